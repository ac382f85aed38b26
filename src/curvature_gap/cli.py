"""The command line: `curvature-gap hessian | analyse | witness | sample-size | abstract | verify`.

Exit status: 0 done, 1 a check failed, 2 bad input. Every command takes `--json` for machines.
"""

import argparse
import json
import math
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2


class BadInputError(ValueError):
    """What the user gave cannot be used; the message says what to do."""


class CheckFailedError(ValueError):
    """A result that failed its own check; the message names the check."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        result, status = options.run(options)
    except (OSError, KeyError, ValueError, TypeError, MemoryError, ModuleNotFoundError) as error:
        print(f"curvature-gap {options.command}: {explained(error)}", file=sys.stderr)
        return CHECK_FAILED if isinstance(error, CheckFailedError) else BAD_INPUT
    if options.json:
        print(json.dumps(strict(result), indent=1, default=str, allow_nan=False))
    else:
        print(as_text(result))
    return int(status)


def explained(error: Exception) -> str:
    """Return an error in one sentence, with what to do where the message alone does not say it."""
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed; pip install 'curvature-gap[pipeline]' brings all."
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{error.filename} is missing: finish the run with `snakemake --cores all`, or name another by --preset."
    return str(error)


def strict(result: Any) -> Any:
    """Return a result as JSON can hold it: what is not finite becomes null."""
    if isinstance(result, dict):
        return {key: strict(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [strict(value) for value in result]
    return None if isinstance(result, float) and not math.isfinite(result) else result


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="curvature-gap", description=__doc__.split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[..., tuple[Any, int]], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        sub.set_defaults(run=run)
        return sub

    sub = command("hessian", hessian, "Compute the exact Hessian of a checkpoint on a batch of its training images.")
    sub.add_argument("run_name", metavar="RUN", help="a run of the workflow, for example mnist_seed0")
    sub.add_argument("--stage", default="trained", help="init, trained or step_00500 (default: trained)")
    sub.add_argument("--preset", default="laptop", help="where the run lies: results/<preset> (default: laptop)")
    sub.add_argument("--batch-size", type=positive, help="images in the batch (default: the configured one)")
    sub.add_argument("--blocks", choices=("all", "diagonal"), default="all", help="what to compute (default: all)")
    sub.add_argument("--engine", choices=("auto", "closed_form", "autodiff"), default="auto")
    sub.add_argument("--output", type=Path, metavar="FILE.npz", help="write the Hessian here")
    sub.add_argument("--threads", type=positive, default=1, help="threads (default: 1)")

    sub = command("analyse", analyse, "Read a stored Hessian: block norms, extreme eigenvalues, trace, certificate.")
    sub.add_argument("path", type=Path, metavar="FILE.npz")
    sub.add_argument(
        "--eigenvalues", type=positive, default=10, metavar="K", help="how many of the largest (default: 10)"
    )

    sub = command("witness", witness, "Reload the worst input found for a bound and print both sides.")
    sub.add_argument("id", metavar="ID", help="a statement's id, for example N1 or T1_main")
    sub.add_argument("--preset", default="laptop", help="read results/<preset>/witnesses (default: laptop)")

    sub = command("sample-size", sample_size, "Smallest k with |L_{k+1} - L_k| < epsilon: bound, fit and observation.")
    sub.add_argument("--epsilon", type=float, required=True, help="tolerance on the loss increment, in nats")
    sub.add_argument("--preset", default="laptop", help="read results/<preset>/tables (default: laptop)")
    sub.add_argument("--run", dest="run_name", default="mnist_seed0", help="which run (default: mnist_seed0)")

    sub = command("abstract", abstract, "What was found on each sentence of the paper's abstract, and by which claims.")
    sub.add_argument("sentence", type=positive, nargs="?", metavar="N", help="one sentence, by number (default: all)")
    sub.add_argument("--preset", default="laptop", help="results/<preset>, else expected/<preset> (default: laptop)")

    sub = command("verify", verify, "Compare a finished run's claims and tables with the expected ones.")
    sub.add_argument("--preset", default="laptop", help="results/<preset> (default: laptop)")
    return top


def positive(text: str) -> int:
    """Return a whole number of at least one."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def as_text(result: Any, indent: str = "") -> str:
    """Lay a result out for reading: one line a number, tables as rows."""
    if isinstance(result, dict):
        lines = []
        for key, value in result.items():
            nested = isinstance(value, dict | list) and value
            lines.append(f"{indent}{key}:\n{as_text(value, indent + '  ')}" if nested else f"{indent}{key}: {value}")
        return "\n".join(lines)
    if isinstance(result, list):
        return "\n".join(f"{indent}{'  '.join(map(str, row)) if isinstance(row, list) else row}" for row in result)
    return f"{indent}{result}"


def _results(preset: str) -> Path:
    folder = Path("results") / preset
    if not folder.is_dir():
        raise BadInputError(f"{folder} does not exist here; run `make reproduce PRESET={preset}` in the clone first.")
    return folder


def _settings(preset: str) -> dict[str, Any]:
    import yaml

    from curvature_gap.settings import load_settings

    path = Path("config/config.yaml")
    if not path.is_file():
        raise BadInputError(f"{path} does not exist here; run this command in the clone.")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    return load_settings(config | {"preset": preset}, Path("workflow/schemas/config.schema.yaml"))


def hessian(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Compute, certify and optionally store the Hessian of a workflow's checkpoint."""
    import numpy as np

    from curvature_gap import data
    from curvature_gap.architecture import Architecture
    from curvature_gap.exact_hessian import CertificateError, exact_hessian
    from curvature_gap.training import load_model

    folder = _results(options.preset)
    name = options.run_name.split("_seed")[0]
    datasets = _settings(options.preset)["datasets"]
    if name not in datasets:
        raise BadInputError(f"{options.run_name}: no dataset is called {name}; there are {', '.join(datasets)}.")
    checkpoint = folder / "checkpoints" / options.run_name / f"{options.stage}.safetensors"
    if not checkpoint.is_file():
        raise BadInputError(f"{checkpoint} does not exist; run the workflow, or check --stage and --preset.")
    batch = datasets[name].get("hessian", {"batch_size": 128, "batch_seed": 0})
    dataset = data.read_prepared(folder / "data" / f"{name}.npz")
    with np.load(folder / "subsets" / f"{name}_seed{batch['batch_seed']}.npz") as subset:
        indices = subset["indices"]
    images, labels, _ = data.hessian_batch(dataset, indices, options.batch_size or batch["batch_size"])
    model = load_model(checkpoint, Architecture(**datasets[name]["architecture"]))
    blocks = None if options.blocks == "all" else "diagonal"
    try:
        H = exact_hessian(model, images, labels, blocks=blocks, engine=options.engine, threads=options.threads)
    except CertificateError as error:
        raise CheckFailedError(str(error)) from error
    if options.output:
        H.save(options.output)
    return summary(H, eigenvalues=0) | {"stored": str(options.output) if options.output else "no"}, DONE


def analyse(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Summarise a stored Hessian."""
    from curvature_gap.exact_hessian import Hessian

    if not options.path.is_file():
        raise BadInputError(f"{options.path} does not exist.")
    if not zipfile.is_zipfile(options.path):
        raise BadInputError(f"{options.path} is not an npz file, or is damaged; `hessian --output` writes one.")
    return summary(Hessian.load(options.path), options.eigenvalues), DONE


def summary(H: Any, eigenvalues: int) -> dict[str, Any]:
    """Return what one wants to know of a Hessian first."""
    spectral, frobenius = H.spectral_norms(), H.frobenius_norms()
    result = {
        "parameters": H.n_parameters,
        "loss": H.loss,
        "gradient norm": H.grad_norm,
        "engine": H.engine,
        "batch sha256": H.batch_sha256,
        "trace": H.trace(),
        "certificate": vars(H.certificate) if H.certificate else "none",
        "diagonal blocks (spectral, Frobenius)": [
            [name, f"{spectral[name, name]:.6g}", f"{frobenius[name, name]:.6g}"] for name in H.names
        ],
    }
    if eigenvalues and H.H is None:
        result["largest eigenvalues by magnitude"] = "not known: only some blocks are stored"
    elif eigenvalues:
        result["largest eigenvalues by magnitude"] = H.eigenvalues(min(eigenvalues, H.n_parameters)).tolist()
    return result


def witness(options: argparse.Namespace) -> tuple[str, int]:
    """Recompute both sides of a bound at the worst input found."""
    from curvature_gap.bound_search import describe_witness

    folder = _results(options.preset) / "witnesses"
    stored = {path.stem: path for path in sorted(folder.glob("part*/*.npz"))}
    if options.id not in stored:
        there = ", ".join(stored) or "none; run the workflow first"
        raise BadInputError(f"no witness is stored for {options.id!r}; there are: {there}.")
    return describe_witness(options.id, stored[options.id]), DONE


def sample_size(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Predict and observe the smallest k with an increment below epsilon."""
    from curvature_gap.sample_size import sample_size_for

    if not options.epsilon > 0:
        raise BadInputError(f"--epsilon must be positive, got {options.epsilon}.")
    return sample_size_for(options.epsilon, _results(options.preset), options.run_name), DONE


def abstract(options: argparse.Namespace) -> tuple[list[dict[str, Any]] | str, int]:
    """Say what was found on the abstract, from a finished run or else from the committed reference."""
    from curvature_gap.abstract import account, claims_at_hand, read_abstract
    from curvature_gap.claims import read_claims

    path = Path("paper/abstract.yaml")
    if not path.is_file():
        raise BadInputError(f"{path} does not exist here; run this command in the clone.")
    sentences = read_abstract(path, [claim.id for claim in read_claims(Path("paper/claims.yaml"))])
    if options.sentence and options.sentence > len(sentences):
        raise BadInputError(f"the abstract has {len(sentences)} sentences; got {options.sentence}.")
    chosen = [s for s in sentences if options.sentence in (None, s.number)]
    source, rows = claims_at_hand(Path("results") / options.preset, Path("expected") / options.preset)
    accounts = [account(sentence, rows, source) for sentence in chosen]
    return accounts if options.json else "\n\n".join(map(as_text, accounts)), DONE


def verify(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Decide whether a finished run reproduces what is expected of it."""
    from curvature_gap.claims import verify_run

    report = verify_run(_results(options.preset), Path("expected") / options.preset)
    return report, DONE if report["passed"] else CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
