"""Functions of the other files, by file; those hold steps alone, so that they read as a list."""

from types import SimpleNamespace

# --- training.smk --------------------------------------------------------------------------------------------


def stages(dataset):
    steps = DATASETS[dataset]["training"].get("checkpoint_steps", [])
    return ["init", *(f"step_{step:05d}" for step in steps), "trained"]


def checkpoint(run, stage):
    return f"{RESULTS}/checkpoints/{run}/{stage}.safetensors"


# --- hessian.smk ---------------------------------------------------------------------------------------------


def hessian(run, stage):
    return f"{RESULTS}/hessians/{run}/{stage}.npz"


def hessian_settings(wildcards):
    return DATASETS[dataset_of(wildcards.run)]["hessian"]


def hessian_batch(wildcards):
    """The subset whose first images are the fixed batch: the same batch for every seed of the model."""
    dataset = dataset_of(wildcards.run)
    return f"{RESULTS}/subsets/{dataset}_seed{DATASETS[dataset]['hessian']['batch_seed']}.npz"


def dataset_file(wildcards):
    return f"{RESULTS}/data/{dataset_of(wildcards.run)}.npz"


# --- experiments.smk -----------------------------------------------------------------------------------------


def having(section):
    return [name for name in DATASETS if section in DATASETS[name]]


def runs_of(section, dataset):
    return [f"{dataset}_seed{seed}" for seed in DATASETS[dataset][section]["seeds"]]


def runs_having(section):
    return [run for name in having(section) for run in runs_of(section, name)]


def seed_of(wildcards):
    return int(wildcards.run.split("_seed")[1])


def step_stage(step):
    return f"step_{step:05d}"


def dynamics_steps(dataset):
    """Every stored step, both ends included."""
    training = DATASETS[dataset]["training"]
    return [0, *training.get("checkpoint_steps", []), training["steps"]]


def increment_parts(suffix):
    return expand(
        f"{RESULTS}/increments/{{run}}{suffix}", run=runs_having("increments")
    )


def nested_training(dataset):
    """The dataset's own training, with other steps and no checkpoints between."""
    left_out = ("n_train", "threads", "checkpoint_steps", "evaluate_every")
    own = {k: v for k, v in DATASETS[dataset]["training"].items() if k not in left_out}
    return own | {"steps": DATASETS[dataset]["curvature_vs_data"]["steps"]}


# --- figures.smk ---------------------------------------------------------------------------------------------


def figure_entry(notebook, category, title, parameters=None, **inputs):
    return {
        "notebook": f"notebooks/{notebook}.ipynb",
        "category": category,
        "title": title,
        "inputs": inputs,
        "parameters": {"preset": PRESET, **(parameters or {})},
    }


def dataset_record(dataset):
    return f"{RESULTS}/data/{dataset}.json"


def metrics(dataset):
    return [f"{RESULTS}/metrics/{run}.csv" for run in runs(dataset)]


def hessian_entries(dataset, init, trained):
    """Return the two heat maps of a dataset's first seed, under these names."""
    run = runs(dataset)[0]
    about = {"data": dataset_record(dataset), "metrics": f"{RESULTS}/metrics/{run}.csv"}
    category = PAPER if dataset == "mnist" else BEYOND
    settings = {"run": run, "batch_size": DATASETS[dataset]["hessian"]["batch_size"]}
    return {
        init: figure_entry(
            "fig03",
            category,
            f"Hessian entries at initialisation ({dataset})",
            settings,
            hessian=hessian(run, "init"),
            data=about["data"],
        ),
        trained: figure_entry(
            "fig04",
            category,
            f"Hessian entries after training ({dataset})",
            settings,
            hessian=hessian(run, "trained"),
            **about,
        ),
    }


def table(name):
    return f"{RESULTS}/tables/{name}.csv"


def steps_shown():
    """Return up to four of the first 1000 steps, evenly chosen among those with a whole Hessian."""
    steps = sorted(
        step
        for step in [0, *DATASETS["mnist"]["dynamics"]["whole_steps"]]
        if step <= 1000
    )
    return (
        [steps[round(i * (len(steps) - 1) / 3)] for i in range(4)]
        if len(steps) > 4
        else steps
    )


def first_steps(notebook, what):
    """Return one of FIG-7 to FIG-11, of the first MNIST run."""
    run = runs("mnist")[0]
    steps = steps_shown()
    stage = {step: step_stage(step) if step else "init" for step in steps}
    return figure_entry(
        notebook,
        PAPER,
        f"{what} during the first 1000 training steps",
        {
            "run": run,
            "steps": steps,
            "batch_size": DATASETS["mnist"]["hessian"]["batch_size"],
        },
        dynamics=table("dynamics"),
        checkpoints=[checkpoint(run, stage[step]) for step in steps],
        hessians=[hessian(run, stage[step]) for step in steps],
        data=dataset_record("mnist"),
    )


def figure_of(wildcards):
    return FIGURES[wildcards.figure]


def figure_code(wildcards):
    """Return the package files that a notebook imports, and those that run it."""
    notebook = ROOT / figure_of(wildcards)["notebook"]
    return sorted(
        {
            *workflow_support.package_files(notebook, ROOT / "src", start=ROOT),
            *code("figure"),
        }
    )


# --- report.smk ----------------------------------------------------------------------------------------------


def figure_records():
    """What the report says of each figure's origin, by name."""
    return {
        name: {
            "title": entry["title"],
            "category": entry["category"],
            "notebook": entry["notebook"],
            "code": figure_code(SimpleNamespace(figure=name)),
            "inputs": [
                path
                for inputs in entry["inputs"].values()
                for path in ([inputs] if isinstance(inputs, str) else inputs)
            ],
        }
        for name, entry in FIGURES.items()
    }


# --- tiles.smk -----------------------------------------------------------------------------------------------


def tile_settings(wildcards):
    return DATASETS[dataset_of(wildcards.run)]["tiles"]


def tile_bytes(dataset):
    """Return the limits of one tile and of one job, in bytes."""
    tiles = DATASETS[dataset]["tiles"]
    return {
        "tile_bytes": int(tiles["tile_mb"] * MEGABYTE),
        "job_bytes": int(tiles["job_mb"] * MEGABYTE),
    }


def n_tile_jobs(dataset):
    """Return the number of jobs, from sizes alone: torch is not imported to plan."""
    architecture = Architecture(**DATASETS[dataset]["architecture"])
    try:
        return plan(architecture, **tile_bytes(dataset))[-1].job + 1
    except ValueError as error:
        raise WorkflowError(f"datasets.{dataset}.tiles.tile_mb is too small: {error}")


def tile_records(wildcards):
    return [
        f"{RESULTS}/tiles/{wildcards.run}/{wildcards.stage}/jobs/{job:04d}.json"
        for job in range(N_TILE_JOBS[dataset_of(wildcards.run)])
    ]


def tile_batch(wildcards):
    dataset = dataset_of(wildcards.run)
    return f"{RESULTS}/subsets/{dataset}_seed{DATASETS[dataset]['tiles']['batch_seed']}.npz"


def tile_architecture(wildcards):
    return DATASETS[dataset_of(wildcards.run)]["architecture"]


def tile_memory(wildcards):
    """A job's tiles twice, and torch with the engine's work space."""
    return int(2 * tile_settings(wildcards)["job_mb"]) + 2000
