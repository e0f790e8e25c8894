//! Mesh of the ranks of a run: parallel pipelines, their stages, and the ranks that share the
//! tensors of a stage.

use potluck_core::Rank;

/// Sizes of a mesh along its axes. Ranks are numbered along the axis of tensors first, then along
/// the axis of stages, then along the axis of pipelines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mesh {
    /// Pipelines, which have different samples. A device that holds the whole model is one.
    pub data: usize,
    /// Stages of a pipeline, which hold different blocks.
    pub pipeline: usize,
    /// Ranks of a stage, which divide its tensors.
    pub tensor: usize,
}

/// Axis of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    Data,
    Pipeline,
    Tensor,
}

/// Place of a rank in a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Pipeline, in `0..mesh.data`.
    pub data: usize,
    /// Stage, in `0..mesh.pipeline`.
    pub pipeline: usize,
    pub tensor: usize,
}

impl Default for Mesh {
    fn default() -> Self {
        Self::of_pipelines(1, 1)
    }
}

impl Mesh {
    /// Returns the mesh of pipelines with stages of one rank each.
    pub const fn of_pipelines(pipelines: usize, stages: usize) -> Self {
        Self { data: pipelines, pipeline: stages, tensor: 1 }
    }

    /// Returns true if a pipeline has several stages, or a stage several ranks, so that a rank
    /// holds a part of the model.
    pub const fn is_divided(self) -> bool {
        self.pipeline > 1 || self.tensor > 1
    }

    /// Returns the number of ranks.
    pub fn world_size(self) -> usize {
        self.data.saturating_mul(self.pipeline).saturating_mul(self.tensor)
    }

    /// Returns the ranks in their order.
    pub fn ranks(self) -> impl Iterator<Item = Rank> + Clone {
        (0..self.world_size() as u32).map(Rank)
    }

    /// Returns the place of a rank.
    pub fn coordinates(self, rank: Rank) -> Coordinates {
        // A damaged record may have an axis of length 0.
        let stages = self.pipeline.max(1);
        let tensors = self.tensor.max(1);
        let of_all_stages = rank.index() / tensors;
        Coordinates {
            data: of_all_stages / stages,
            pipeline: of_all_stages % stages,
            tensor: rank.index() % tensors,
        }
    }

    /// Returns the rank at a place.
    pub fn rank(self, at: Coordinates) -> Rank {
        Rank(((at.data * self.pipeline + at.pipeline) * self.tensor + at.tensor) as u32)
    }

    /// Returns the ranks whose places differ from the place of a rank along one axis only, in order
    /// of ranks, with the rank itself.
    pub fn group(self, axis: Axis, rank: Rank) -> Vec<Rank> {
        let own = self.coordinates(rank);
        let size = match axis {
            Axis::Data => self.data,
            Axis::Pipeline => self.pipeline,
            Axis::Tensor => self.tensor,
        };
        let mut members = Vec::new();
        for index in 0..size {
            members.push(self.rank(match axis {
                Axis::Data => Coordinates { data: index, ..own },
                Axis::Pipeline => Coordinates { pipeline: index, ..own },
                Axis::Tensor => Coordinates { tensor: index, ..own },
            }));
        }
        members
    }

    /// Returns the first rank of each pipeline.
    pub fn first_ranks(self) -> impl Iterator<Item = Rank> + Clone {
        (0..self.data).map(move |data| self.rank(Coordinates { data, pipeline: 0, tensor: 0 }))
    }

    /// Returns the tensor groups of each pipeline, by stage.
    pub fn pipelines(self) -> impl Iterator<Item = Vec<Vec<Rank>>> + Clone {
        self.first_ranks().map(move |first| {
            let stages = self.group(Axis::Pipeline, first);
            stages.into_iter().map(|stage| self.group(Axis::Tensor, stage)).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AXES: [Axis; 3] = [Axis::Data, Axis::Pipeline, Axis::Tensor];

    fn meshes() -> Vec<Mesh> {
        let mut meshes = Vec::new();
        for data in 1..=4 {
            for pipeline in 1..=3 {
                for tensor in 1..=3 {
                    meshes.push(Mesh { data, pipeline, tensor });
                }
            }
        }
        meshes
    }

    #[test]
    fn ranks_and_coordinates_are_a_bijection() {
        for mesh in meshes() {
            let Mesh { data, pipeline, tensor } = mesh;
            assert_eq!(mesh.world_size(), data * pipeline * tensor);
            assert_eq!(mesh.ranks().count(), mesh.world_size());
            for rank in mesh.ranks() {
                let at = mesh.coordinates(rank);
                assert!(at.data < data && at.pipeline < pipeline && at.tensor < tensor, "{at:?}");
                assert_eq!(mesh.rank(at), rank, "{mesh:?}");
            }
        }
    }

    #[test]
    fn the_groups_of_an_axis_partition_the_ranks_in_order() {
        for mesh in meshes() {
            for axis in AXES {
                let mut seen = Vec::new();
                for rank in mesh.ranks() {
                    let group = mesh.group(axis, rank);
                    assert!(group.is_sorted_by(|one, next| one < next), "{group:?}");
                    assert!(group.contains(&rank), "{mesh:?} {axis:?} {rank}");
                    assert!(group.iter().all(|member| mesh.group(axis, *member) == group));
                    if group[0] == rank {
                        seen.extend(group);
                    }
                }
                seen.sort_unstable();
                assert_eq!(seen, mesh.ranks().collect::<Vec<_>>(), "{mesh:?} {axis:?}");
            }
        }
    }

    #[test]
    fn pipelines_follow_each_other_stage_by_stage() {
        let mesh = Mesh::of_pipelines(2, 3);
        let ranks = |of: [u32; 3]| of.map(|rank| vec![Rank(rank)]).to_vec();
        assert_eq!(mesh.pipelines().collect::<Vec<_>>(), [ranks([0, 1, 2]), ranks([3, 4, 5])]);
        assert_eq!(mesh.first_ranks().collect::<Vec<_>>(), [Rank(0), Rank(3)]);
        assert_eq!(mesh.group(Axis::Data, Rank(4)), [Rank(1), Rank(4)]);
        assert_eq!(mesh.coordinates(Rank(5)), Coordinates { data: 1, pipeline: 2, tensor: 0 });
        let deep = Mesh { tensor: 2, ..mesh };
        assert_eq!(deep.group(Axis::Tensor, Rank(7)), [Rank(6), Rank(7)]);
        assert_eq!(deep.group(Axis::Pipeline, Rank(7)), [Rank(7), Rank(9), Rank(11)]);
        let second = deep.pipelines().nth(1).unwrap();
        assert_eq!(second, [[6, 7], [8, 9], [10, 11]].map(|group| group.map(Rank).to_vec()));
    }

    #[test]
    fn a_damaged_mesh_has_no_ranks_and_does_not_overflow() {
        let none = Mesh { data: 2, pipeline: 0, tensor: 0 };
        assert_eq!((none.world_size(), none.coordinates(Rank(3)).data), (0, 3));
        let huge = Mesh { data: usize::MAX, pipeline: 3, tensor: 2 };
        assert_eq!(huge.world_size(), usize::MAX);
    }
}
