//! Places by the variables that launchers set, and what is refused.

use super::*;

/// Finds the place in these variables, without flags.
fn place_in(variables: &[(&str, &str)]) -> Result<FoundTask, String> {
    place_with(&TaskPlace::default(), variables)
}

fn place_with(flags: &TaskPlace, variables: &[(&str, &str)]) -> Result<FoundTask, String> {
    let of = |name: &str| {
        let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
        Some(value.to_string())
    };
    find(flags, true, &of).map_err(|error| error.to_string())
}

fn check(variables: &[(&str, &str)], [rank, world, local, here]: [u32; 4], address: &str) {
    let found = place_in(variables).unwrap();
    assert_eq!(
        [found.rank, found.world, found.local_rank, found.local_world],
        [rank, world, local, here]
    );
    assert_eq!(found.address, address);
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("GROUP_RANK", "1"),
    ("MASTER_ADDR", "node-a"),
    ("MASTER_PORT", "29400"),
    ("TORCHELASTIC_RUN_ID", "7"),
];

const SRUN: &[(&str, &str)] = &[
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "2"),
    ("SLURM_TASKS_PER_NODE", "1(x2),2"),
    ("SLURM_STEP_NODELIST", "n[07-09]"),
    ("SLURM_JOB_ID", "12"),
    ("SLURM_STEP_ID", "1"),
];

#[test]
fn variables_of_all_launchers_are_read() {
    check(TORCHRUN, [3, 4, 1, 2], "node-a:29400");
    check(SRUN, [3, 4, 0, 2], "n07:20193");
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "3"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        ("OMPI_MCA_orte_hnp_uri", "315.0;tcp://10.0.0.5,172.17.0.1:4444;tcp6://[::1]:4445"),
    ];
    check(&open_mpi, [1, 3, 0, 1], "10.0.0.5");
    let mpich =
        [("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("MPI_LOCALRANKID", "2"), ("MPI_LOCALNRANKS", "3")];
    check(&mpich, [2, 3, 2, 3], "127.0.0.1:7717");
    let sky_pilot = [
        ("SKYPILOT_NODE_RANK", "1"),
        ("SKYPILOT_NUM_NODES", "2"),
        ("SKYPILOT_NODE_IPS", "10.1.0.4\n10.1.0.5"),
    ];
    check(&sky_pilot, [1, 2, 0, 1], "10.1.0.4");
    let indexed_job = [
        ("JOB_COMPLETION_INDEX", "1"),
        ("POTLUCK_WORLD", "3"),
        ("POTLUCK_ADDRESS", "train-0.train:7717"),
    ];
    check(&indexed_job, [1, 3, 0, 1], "train-0.train:7717");
    let found = place_in(&[]).unwrap();
    assert_eq!((found.rank, found.world), (0, 1));
}

#[test]
fn the_innermost_launcher_counts_and_is_named() {
    let all = [TORCHRUN, SRUN].concat();
    check(&all, [3, 4, 1, 2], "node-a:29400");
    let text = place_in(&all).unwrap().to_string();
    assert!(text.starts_with("rank 3 of 4, 1 of 2 on this host, the first node at node-a:29400"));
    assert!(text.contains("from torchrun or Ray Train (RANK, WORLD_SIZE"), "{text}");
    assert!(text.ends_with("inside of srun"), "{text}");
}

/// A batch script has a rank of Slurm, and so has whatever it starts.
#[test]
fn the_shell_of_a_batch_script_is_no_task() {
    let shell = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "9")];
    let why = place_in(&shell).unwrap_err();
    assert!(why.contains("start it with `srun potluck launch"), "{why}");
    let nodes = [("SLURM_PROCID", "0"), ("SLURM_JOB_NUM_NODES", "4"), ("SLURM_JOB_ID", "9")];
    assert_eq!(place_in(&nodes).unwrap_err(), why);
    let alone = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_ID", "9")];
    assert_eq!(place_in(&alone).unwrap().world, 1);
    let mpich = [("PMI_RANK", "2"), ("PMI_SIZE", "3"), ("MPI_LOCALNRANKS", "3")];
    check(&[&shell[..], &mpich].concat(), [2, 3, 0, 3], "127.0.0.1:7717");
}

#[test]
fn flags_go_before_variables_and_must_not_contradict_them() {
    let flags = TaskPlace { address: Some("b:1".into()), ..TaskPlace::default() };
    assert_eq!(place_with(&flags, SRUN).unwrap().address, "b:1");
    let flags = TaskPlace { rank: Some(1), ..TaskPlace::default() };
    let why = place_with(&flags, SRUN).unwrap_err();
    assert!(why.contains("the rank is 1 by a flag or POTLUCK_* and 3 by SLURM_PROCID"), "{why}");
    let why = place_with(&flags, &[("POTLUCK_RANK", "2")]).unwrap_err();
    assert!(why.contains("the rank is 1 by a flag and 2 by POTLUCK_*"), "{why}");
    let both = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "3"),
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "3"),
    ];
    let why = place_in(&both).unwrap_err();
    assert!(why.contains("the rank is 2 by OMPI_COMM_WORLD_RANK"), "{why}");
    // What srun --mpi=pmi2 sets, and mpiexec in a task of srun.
    let same = [SRUN, &[("PMI_RANK", "3"), ("PMI_SIZE", "4")]].concat();
    check(&same, [3, 4, 0, 2], "n07:20193");
    let within = [SRUN, &[("PMI_RANK", "1"), ("PMI_SIZE", "2")]].concat();
    check(&within, [1, 2, 0, 1], "n07:20193");
    let alone = find(&TaskPlace::default(), false, &|name| {
        SRUN.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.to_string())
    });
    assert_eq!(alone.unwrap().world, 1);
}

#[test]
fn incomplete_and_impossible_places_are_refused() {
    for (variables, why) in [
        (&[("JOB_COMPLETION_INDEX", "1")][..], "does not tell the number of processes"),
        (&[("POTLUCK_WORLD", "2")], "does not tell the rank of this process"),
        (&[("POTLUCK_WORLD", "2"), ("POTLUCK_RANK", "0")], "the address of the first node"),
        (&[("POTLUCK_WORLD", "2"), ("POTLUCK_RANK", "2")], "there is no rank 2 of 2"),
        (&[("RANK", "70"), ("WORLD_SIZE", "128")], "at most 64 processes, not 128"),
        (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK = 'x' is not a whole number"),
        (&[("OMPI_COMM_WORLD_RANK", "-1")], "is not a whole number"),
        (
            &[("SLURM_STEP_ID", "0"), ("SLURM_NODEID", "0"), ("SLURM_TASKS_PER_NODE", "2(x")],
            "is no list of numbers of tasks",
        ),
        (
            &[
                ("SLURM_STEP_ID", "0"),
                ("SLURM_NODEID", "9"),
                ("SLURM_TASKS_PER_NODE", "1(x9),1(x4294967295),1"),
            ],
            "does not tell the number of processes",
        ),
        (&[("SLURM_STEP_ID", "0"), ("SLURM_STEP_NODELIST", "n[")], "is no list of hosts"),
    ] {
        let found = place_in(variables).unwrap_err();
        assert!(found.contains(why), "{found}");
    }
}
