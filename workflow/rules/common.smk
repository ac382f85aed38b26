"""Settings, device and helpers that every rule file uses. No rule stands here."""

import hashlib
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.script import PythonScript
from snakemake_interface_executor_plugins.settings import ExecMode

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from curvature_gap import preflight, workflow_support
from curvature_gap.settings import SettingsError, load_settings

# Jobs go to a cluster when `jobs` bounds their number; and a process that runs one job for another Snakemake is not the
# one that plans.
ON_THIS_MACHINE = workflow.resource_settings.nodes is None
IS_MAIN = workflow.exec_mode == ExecMode.DEFAULT


def quote_interpreter():
    """Let scripts run where the environment's path has a space or a quote: Snakemake puts it bare into a shell command."""
    execute = PythonScript._execute_cmd

    def quoted(self, command, **values):
        if values.get("py_exec") == sys.executable:
            values["py_exec"] = shlex.quote(sys.executable)
        return execute(self, command, **values)

    PythonScript._execute_cmd = quoted


quote_interpreter()

try:
    SETTINGS = load_settings(config, ROOT / "workflow/schemas/config.schema.yaml")
    DEVICE = workflow_support.device_of_jobs(
        SETTINGS["device"], main=IS_MAIN, local=ON_THIS_MACHINE
    )
    if IS_MAIN and ON_THIS_MACHINE:
        preflight.check(SETTINGS, preflight.total_mb())
except SettingsError as error:
    raise WorkflowError(f"config/config.yaml cannot be run:\n{error}")

PRESET = SETTINGS["preset"]
RESULTS = f"results/{PRESET}"
DATASETS = SETTINGS["datasets"]
# Part of every cached rule's params: without conda, a cache key would know no software version.
LOCK_HASH = hashlib.sha256((ROOT / "envs/requirements.lock").read_bytes()).hexdigest()[
    :16
]
ENVIRONMENT = "../../envs/curvature-gap.yaml"
GPUS_PER_JOB = 1 if DEVICE == "cuda" else 0

# One machine's limits, unless the command line sets its own. They bind local runs only; a cluster's scheduler knows its
# own, and a login node without a GPU must not limit it.
if IS_MAIN and ON_THIS_MACHINE:
    for limit, value in preflight.limits(DEVICE).items():
        if limit not in workflow.global_resources:
            workflow.register_resource(limit, value)


wildcard_constraints:
    dataset="[A-Za-z][A-Za-z0-9-]*",
    run=r"[A-Za-z][A-Za-z0-9-]*_seed\d+(_\w+)?",
    seed=r"\d+",
    stage=r"init|trained|step_\d{5}",


def code(script):
    """Return a script of workflow/scripts and the package files it imports, directly or not.

    Snakemake tracks neither what a script imports nor, beyond its date, the script itself; as inputs, compared by
    content, an edited theorem reruns its checks and leaves the models alone, and a touched file reruns nothing.
    """
    path = ROOT / "workflow/scripts" / f"{script}.py"
    files = workflow_support.package_files(path, ROOT / "src", start=ROOT)
    return [f"workflow/scripts/{script}.py", *files]


def runs(dataset):
    return [f"{dataset}_seed{seed}" for seed in DATASETS[dataset]["seeds"]]


def dataset_of(run):
    return run.split("_seed")[0]


def timing(rule_name, *wildcards):
    return f"{Path(RESULTS, 'timings', rule_name, *wildcards)}.json"


def log_file(rule_name, *wildcards):
    return f"{Path(RESULTS, 'logs', rule_name, *wildcards)}.log"
