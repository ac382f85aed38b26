"""A private one-node Slurm with two made-up GPUs, and a clone of the repository whose jobs go to it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from clones import ROOT, SNAKEMAKE, STEERING, copy_clone

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
PROGRAMS = ("slurmctld", "slurmd", "squeue", "munged")


@dataclass
class Slurm:
    """The cluster under `folder`, spoken to by the wrappers in `folder/bin`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with the cluster's commands first on PATH and nothing that steers a run."""
        environment = os.environ | {"PATH": f"{self.folder / 'bin'}:{BIN}:{os.environ['PATH']}"}
        for variable in STEERING:
            environment.pop(variable, None)
        return environment

    def __call__(self, *command: str) -> str:
        """Return the output of a Slurm command."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def jobs(self) -> dict[int, dict[str, str]]:
        """Return every job that Slurm remembers, as `scontrol show job` tells it."""
        found = {}
        for line in self("scontrol", "-o", "show", "job").splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "JobId" in fields:
                found[int(fields["JobId"])] = fields
        return found

    def wait_for(self, condition, seconds: float, what: str):
        """Return the first true value of `condition()`; fail, with Slurm's logs, when there is none in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            time.sleep(0.2)
        pytest.fail(f"{what} did not happen within {seconds} s.\n{self('squeue', '--states=all')}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(
            f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("log/*.log"))
        )

    def running(self, rule: str, among: set[int]) -> int | None:
        """Return a running job of a rule that is not `among` the known ones."""
        for number, fields in self.jobs().items():
            ours = fields.get("Comment", "").startswith(f"rule_{rule}")
            if ours and number not in among and fields["JobState"] == "RUNNING":
                return number
        return None

    def kill_node(self, job: int) -> None:
        """SIGKILL the node's daemon and everything of one job on it, as a power loss would."""
        os.kill(int((self.folder / "run/slurmd.pid").read_text()), signal.SIGKILL)
        tree = process_tree()
        steps = [pid for pid, (_, words) in tree.items() if words.startswith(f"slurmstepd: [{job}.")]
        for pid in steps + [pid for step in steps for pid in descendants(step, tree)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_node(self) -> None:
        self(str(self.folder / "bin/start_node"))


def process_tree() -> dict[int, tuple[int, str]]:
    """Return every process: its parent and its command line."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 2) for line in listing.splitlines()[1:])
    return {int(row[0]): (int(row[1]), row[2] if len(row) > 2 else "") for row in rows}


def descendants(pid: int, tree: dict[int, tuple[int, str]]) -> list[int]:
    children = [child for child, (parent, _) in tree.items() if parent == pid]
    return children + [pid for child in children for pid in descendants(child, tree)]


@pytest.fixture(scope="module")
def slurm():
    if os.geteuid() != 0:
        pytest.skip("a private Slurm needs root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client munge")
    # A short path: Unix sockets lie in it, and their names may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    up = subprocess.run([HERE / "slurm_up.sh", folder], capture_output=True, text=True, timeout=60, check=False)
    try:
        if up.returncode != 0:
            pytest.fail(f"Slurm did not come up:\n{up.stdout}{up.stderr}")
        yield Slurm(folder)
    finally:
        down = subprocess.run([HERE / "slurm_down.sh", folder], timeout=60, check=False)
        shutil.rmtree(folder, ignore_errors=True)
        assert down.returncode == 0, "a daemon of the private Slurm is still alive"


@dataclass
class Run:
    """A clone of the repository on the cluster's (only) node."""

    root: Path
    slurm: Slurm

    def command(self, *flags: str) -> list[str]:
        """Snakemake, by the shipped profile, but it asks every second and requests a GPU for tiles."""
        return [
            *(sys.executable, str(HERE / "poll_every_second.py")),
            *("--profile", "profiles/test", "--configfile", "tests/slurm/tiles.yaml", *flags),
            *("--config", "preset=smoke", "device=cpu", "--", "hessian_tiles"),
        ]

    def prepare(self) -> None:
        """Make the inputs of the tiles on this machine: what is tested is how jobs fare on the cluster."""
        targets = f"{self.tiles.relative_to(self.root)}/manifest.json"
        settings = ("--configfile", "tests/slurm/tiles.yaml", "--config", "preset=smoke", "device=cpu")
        done = subprocess.run(
            [SNAKEMAKE, "--cores", "2", *settings, "--", targets],
            cwd=self.root,
            env=self.slurm.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    def unlock(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("--unlock"),
            cwd=self.root,
            env=self.slurm.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                self.command(), cwd=self.root, env=self.slurm.environment, stdout=file, stderr=subprocess.STDOUT
            )

    def finish(self, process: subprocess.Popen[bytes], log: Path, seconds: float = 150) -> str:
        """Wait for a run and return its messages; fail with them unless it ended well."""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        text = log.read_text(errors="replace")
        assert process.returncode == 0, f"{text[-5000:]}\n{self.slurm.logs()}"
        return text

    @property
    def tiles(self) -> Path:
        return self.root / "results/smoke/tiles/mnist_seed0/trained"

    def forget_tiles(self, job: int) -> None:
        """Undo the gathered Hessian and one tile job."""
        (self.tiles / "hessian.npz").unlink()
        record = self.tiles / f"jobs/{job:04d}.json"
        for tile in json.loads(record.read_text()):
            (self.tiles / f"entries/{tile}.npy").unlink()
        record.unlink()


@pytest.fixture(scope="module")
def cluster_run(slurm, tmp_path_factory):
    root = copy_clone(tmp_path_factory.mktemp("slurm") / "clone")
    profile = yaml.safe_load((ROOT / "profiles/slurm/profile.yaml").read_text(encoding="utf-8"))
    profile |= {
        "slurm-init-seconds-before-status-checks": 1,
        "seconds-between-status-checks": 1,
        "latency-wait": 10,
        "retries": 1,
    }
    profile["set-resources"]["tile_job"]["gpu"] = 1
    (root / "profiles/test").mkdir()
    (root / "profiles/test/profile.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    made = Run(root, slurm)
    made.prepare()
    return made
