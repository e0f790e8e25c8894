//! The files of `examples/launch` by the schemas of the programs that read them, and the same files
//! with an error.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::node_processes::desk;
use crate::process::{Desk, skip};
use crate::{POTLUCK, changed, file, program, run};

/// Version of Kubernetes of whose schemas the package has a copy.
const KUBERNETES: &str = "1.37";

/// Compares a JobSet with what its model, made from its schema, keeps of it, and takes out the Job,
/// whose schema another program has.
const CHECK_JOB_SET: &str = "
import sys, yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

def compare(place, given, kept):
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            compare(f'{place}.{name}', value, kept.get(name))
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept)):
            compare(f'{place}[{index}]', one, other)
    elif given != kept:
        sys.exit(f'{place} is {given}, of which the model keeps {kept}')

with open(sys.argv[1]) as file:
    job_set = yaml.safe_load(file)
compare('jobset', job_set, JobsetV1alpha2JobSet.from_dict(job_set).to_dict())
for one in job_set['spec']['replicatedJobs']:
    job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': one['name']}}
    with open('job.yaml', 'w') as file:
        yaml.safe_dump({**job, 'spec': one['template']['spec']}, file)
";

/// Reads a task as `sky jobs launch` does, with the secret that its command line gives.
const READ_TASK: &str = "
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
task.update_secrets({'RUN_CODE': 'code'})
print(task.num_nodes, 'nodes', *(resource.accelerators for resource in task.resources))
";

/// Returns true if Python has a package.
fn has_package(desk: &Desk, python: &Path, package: &str) -> bool {
    run(desk, python, &["-c", &format!("import {package}")]).code() == Some(0)
}

#[test]
fn indexed_job_follows_schemas_of_kubernetes() {
    let Some(validate) = program("kubernetes-validate") else {
        return skip("launchers: there is no kubernetes-validate");
    };
    let desk = desk();
    let jobs = file("indexed-job.yaml");
    let told = run(&desk, &validate, &["--strict", "-k", KUBERNETES, jobs.to_str().unwrap()]).ok();
    assert!(format!("{}{}", told.out, told.err).contains("job/potluck"), "{}", told.err);
    desk.write(
        "wrong.yaml",
        changed("indexed-job.yaml", &[("completionMode:", "completionsMode:")]),
    );
    let wrong = run(&desk, &validate, &["--strict", "-k", KUBERNETES, "wrong.yaml"]);
    assert_ne!(wrong.code(), Some(0));
}

#[test]
fn job_set_follows_its_schema() {
    let (Some(validate), Some(python)) = (program("kubernetes-validate"), program("python")) else {
        return skip("launchers: there is no kubernetes-validate");
    };
    let desk = desk();
    if !has_package(&desk, &python, "kubeflow_trainer_api") {
        return skip("launchers: Python has no kubeflow_trainer_api, with the schema of JobSet");
    }
    run(&desk, &python, &["-c", CHECK_JOB_SET, file("jobset.yaml").to_str().unwrap()]).ok();
    run(&desk, &validate, &["--strict", "-k", KUBERNETES, "job.yaml"]).ok();
    for (right, wrong, told) in [
        (
            "maxRestarts:",
            "maximumRestarts:",
            "maximumRestarts is 10, of which the model keeps None",
        ),
        ("onJobFailureReasons: [PodFailurePolicy]", "onJobFailureReasons: [9]", "valid string"),
    ] {
        desk.write("wrong.yaml", changed("jobset.yaml", &[(right, wrong)]));
        let ran = run(&desk, &python, &["-c", CHECK_JOB_SET, "wrong.yaml"]);
        assert!(ran.code() != Some(0) && ran.err.contains(told), "{wrong}: {}", ran.err);
    }
}

#[test]
fn task_of_sky_pilot_is_read_by_it() {
    let Some(python) = env::var_os("POTLUCK_SKYPILOT_PYTHON").map(PathBuf::from) else {
        return skip("launchers: POTLUCK_SKYPILOT_PYTHON names no Python with SkyPilot");
    };
    let desk = desk();
    // The files that it takes along.
    desk.write("config.toml", "");
    fs::create_dir(desk.path("potluck-0.2.0-x86_64-linux")).unwrap();
    let ran = run(&desk, &python, &["-c", READ_TASK, file("skypilot.yaml").to_str().unwrap()]).ok();
    assert!(ran.out.contains("4 nodes {'L4': 1"), "{}", ran.out);
    for (right, wrong) in [
        ("recover_on_exit_codes: [75]", "recover_on_exit_codes: [seventy-five]"),
        ("num_nodes: 4", "number_of_nodes: 4"),
    ] {
        desk.write("wrong.yaml", changed("skypilot.yaml", &[(right, wrong)]));
        let ran = run(&desk, &python, &["-c", READ_TASK, "wrong.yaml"]);
        assert!(ran.code() != Some(0), "{wrong}: {}", ran.out);
    }
}

#[test]
fn the_file_of_compose_follows_its_schema() {
    let Some(check) = program("check-jsonschema") else {
        return skip("launchers: there is no check-jsonschema");
    };
    let desk = desk();
    let schema = ["--builtin-schema", "vendor.compose-spec"];
    let compose = file("docker-compose.yaml");
    run(&desk, &check, &[schema[0], schema[1], compose.to_str().unwrap()]).ok();
    desk.write("wrong.yaml", changed("docker-compose.yaml", &[("restart:", "restrat:")]));
    assert_ne!(run(&desk, &check, &[schema[0], schema[1], "wrong.yaml"]).code(), Some(0));
}

#[test]
fn the_unit_of_systemd_is_verified() {
    let Some(analyze) = program("systemd-analyze") else {
        return skip("launchers: there is no systemd-analyze");
    };
    let desk = desk();
    // The program has to be there.
    let unit = changed("potluck.service", &[("/usr/local/bin/potluck", POTLUCK)]);
    desk.write("potluck.service", &unit);
    let ran = run(&desk, &analyze, &["verify", "./potluck.service"]).ok();
    assert!(!ran.err.contains("potluck.service"), "{}", ran.err);
    desk.write("wrong.service", unit.replace("RestartForceExitStatus", "RestartForcedExitStatus"));
    assert!(run(&desk, &analyze, &["verify", "./wrong.service"]).err.contains("Unknown key"));
}
