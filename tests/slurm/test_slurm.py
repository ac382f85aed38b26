"""The workflow on a real one-node Slurm: what jobs ask for and get, and nothing lost when something dies."""

import hashlib
import os
import re
import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def finished(cluster_run, tmp_path_factory):
    """The hash of the Hessian that an undisturbed run through Slurm gathers."""
    log = tmp_path_factory.mktemp("logs") / "undisturbed.txt"
    cluster_run.finish(cluster_run.start(log), log)
    return digest(cluster_run.tiles / "hessian.npz")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def n_tile_jobs(run):
    return len(list((run.tiles / "jobs").glob("*.json")))


def of_rule(slurm, rule):
    return [fields for fields in slurm.jobs().values() if fields.get("Comment", "").startswith(f"rule_{rule}")]


def test_every_job_goes_through_slurm_and_ends_with_status_0(slurm, cluster_run, finished):
    jobs = slurm.jobs()
    assert len(jobs) == n_tile_jobs(cluster_run) + 1 <= 25
    assert {fields["JobState"] for fields in jobs.values()} == {"COMPLETED"}
    assert {fields["ExitCode"] for fields in jobs.values()} == {"0:0"}


def test_jobs_ask_for_what_rules_and_profile_say(slurm, cluster_run, finished):
    (gathering,) = of_rule(slurm, "gather_tiles")
    assert gathering["TimeLimit"] == "02:00:00"
    assert gathering["MinMemoryNode"] == "3000M"
    assert gathering["Partition"] == "main"
    assert "TresPerJob" not in gathering
    tiles = of_rule(slurm, "tile_job")
    assert len(tiles) == n_tile_jobs(cluster_run) > 2
    for fields in tiles:
        assert fields["TresPerJob"] == "gres:gpu:1"
        assert fields["TimeLimit"] == "04:00:00"
        assert fields["MinMemoryNode"] == "2003M"
        assert fields["CPUs/Task"] == "1"
        assert fields["Requeue"] == "1"


def test_a_gpu_job_sees_the_one_gpu_that_slurm_gave_it(cluster_run, finished):
    logs = sorted((cluster_run.root / "results/smoke/logs/tile_job/mnist_seed0/trained").glob("*.log"))
    seen = [re.search(r"CUDA_VISIBLE_DEVICES=(\S+)", path.read_text()).group(1) for path in logs]
    assert len(seen) == n_tile_jobs(cluster_run)
    assert set(seen) <= {"0", "1"}


def test_a_cancelled_job_is_submitted_again(slurm, cluster_run, finished, tmp_path):
    known = set(slurm.jobs())
    cluster_run.forget_tiles(0)
    process = cluster_run.start(tmp_path / "log")
    job = slurm.wait_for(lambda: slurm.running("tile_job", known), 60, "the start of a tile job")
    slurm("scancel", str(job))
    text = cluster_run.finish(process, tmp_path / "log")
    assert f"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in text
    again = [fields for number, fields in slurm.jobs().items() if number not in known]
    assert sorted(fields["JobState"] for fields in again) == ["CANCELLED", "COMPLETED", "COMPLETED"]
    assert digest(cluster_run.tiles / "hessian.npz") == finished


def test_jobs_of_a_killed_node_are_requeued(slurm, cluster_run, finished, tmp_path):
    known = set(slurm.jobs())
    cluster_run.forget_tiles(0)
    process = cluster_run.start(tmp_path / "log")
    job = slurm.wait_for(lambda: slurm.running("tile_job", known), 60, "the start of a tile job")
    slurm.kill_node(job)
    slurm.wait_for(lambda: slurm.jobs()[job]["JobState"] != "RUNNING", 60, "the loss of the node")
    slurm.start_node()
    cluster_run.finish(process, tmp_path / "log")
    assert slurm.jobs()[job]["Restarts"] == "1"
    assert slurm.jobs()[job]["JobState"] == "COMPLETED"
    assert digest(cluster_run.tiles / "hessian.npz") == finished


def test_after_a_killed_snakemake_a_rerun_completes(slurm, cluster_run, finished, tmp_path):
    known = set(slurm.jobs())
    cluster_run.forget_tiles(0)
    process = cluster_run.start(tmp_path / "killed")
    slurm.wait_for(lambda: slurm.running("tile_job", known), 60, "the start of a tile job")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # The lock and the job outlive it: the one command of the recovery, and Slurm's own job ends as it likes.
    unlocked = cluster_run.unlock()
    assert unlocked.returncode == 0, unlocked.stderr
    cluster_run.finish(cluster_run.start(tmp_path / "again"), tmp_path / "again")
    slurm.wait_for(lambda: not slurm("squeue", "-h"), 60, "the end of all jobs")
    assert digest(cluster_run.tiles / "hessian.npz") == finished
