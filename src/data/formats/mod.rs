//! Readers of data sets on disk. Each returns samples or one sentence that names the file, the
//! place in it and what was expected; none reads more into memory than the file justifies.

/// Format of samples on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleFormat {
    /// Images and labels of MNIST's format, gzipped or not.
    Idx,
    /// CIFAR-10's binary version.
    Cifar10,
    /// A table with a header line.
    Csv,
    /// NumPy arrays.
    Npy,
    /// A directory of pictures per class.
    Pictures,
}

/// Kind of the targets of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    Classes,
    Values,
}

/// Options of a reader.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// Columns of a table that are targets; only those of classes may have several.
    pub target: Vec<String>,
    /// Kind of targets that could be either; `None`: as their type suggests.
    pub kind: Option<TargetKind>,
    /// Height and width that pictures are resized to.
    pub image_size: Option<(usize, usize)>,
    /// What a model was trained on, if samples for that model are read.
    pub known: Option<KnownSamples>,
}

/// What samples that are read for a trained model must be like.
#[derive(Clone, Debug, Default)]
pub struct KnownSamples {
    pub shape: Vec<usize>,
    /// Columns of a table, in the model's order.
    pub columns: Vec<String>,
    /// Names of the classes, in the model's order; empty for values.
    pub classes: Vec<String>,
}
