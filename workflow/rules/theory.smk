"""The paper's statements: every identity and every bound, as printed and as corrected."""

# The bound search is cut into this many jobs; a statement stays with its parts.
SEARCH_PARTS = [0, 1]
# The run whose checkpoints and token embeddings are bounded.
BOUNDS_RUN = runs("mnist")[0]


rule identities:
    """D, P, PR, L, GN, OP, FN, G, SM, T2 to T5: closed forms against automatic differentiation."""
    input:
        code=code("identities"),
    output:
        table=f"{RESULTS}/theory/identities.csv",
        latex=f"{RESULTS}/theory/identities.tex",
        timing=timing("identities"),
    log:
        log_file("identities"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=2000,
    params:
        lock=LOCK_HASH,
    script:
        "../scripts/identities.py"


rule bound_search:
    """N, T1, L3, T6, T7, P7, P11, PR10: is there an input that violates the bound?"""
    input:
        code=code("bound_search"),
    output:
        table=f"{RESULTS}/theory/bounds_{{part}}.csv",
        latex=f"{RESULTS}/theory/bounds_{{part}}.tex",
        witnesses=directory(f"{RESULTS}/witnesses/part{{part}}"),
        timing=timing("bound_search", "part{part}"),
    log:
        log_file("bound_search", "part{part}"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=3000,
    params:
        search=SETTINGS["theory"],
        part=lambda wildcards: int(wildcards.part),
        n_parts=len(SEARCH_PARTS),
        lock=LOCK_HASH,
    script:
        "../scripts/bound_search.py"


rule statements:
    """One row a statement, in the order of the paper's ids."""
    input:
        tables=[
            f"{RESULTS}/theory/identities.csv",
            *expand(f"{RESULTS}/theory/bounds_{{part}}.csv", part=SEARCH_PARTS),
        ],
        ids="paper/statement_ids.txt",
        code=code("statements"),
    output:
        table=f"{RESULTS}/tables/statements.csv",
        latex=f"{RESULTS}/tables/statements.tex",
    log:
        log_file("statements"),
    conda:
        ENVIRONMENT
    script:
        "../scripts/statements.py"


rule norm_inequalities:
    """TAB-2: each constant of the norm table with the ratio it attains."""
    input:
        code=code("norm_inequalities"),
    output:
        table=f"{RESULTS}/tables/tab02_norm_inequalities.csv",
        latex=f"{RESULTS}/tables/tab02_norm_inequalities.tex",
        timing=timing("norm_inequalities"),
    log:
        log_file("norm_inequalities"),
    conda:
        ENVIRONMENT
    threads: 1
    params:
        search=SETTINGS["theory"],
        lock=LOCK_HASH,
    script:
        "../scripts/norm_inequalities.py"


rule precision:
    """THESIS-1: closed forms against autograd, error and time."""
    input:
        code=code("precision"),
    output:
        table=f"{RESULTS}/tables/precision.csv",
        latex=f"{RESULTS}/tables/precision.tex",
        times=f"{RESULTS}/tables/precision_timing.csv",
        times_latex=f"{RESULTS}/tables/precision_timing.tex",
        timing=timing("precision"),
    log:
        log_file("precision"),
    conda:
        ENVIRONMENT
    threads: 1
    params:
        sizes=SETTINGS["theory"]["timing_sizes"],
        lock=LOCK_HASH,
    script:
        "../scripts/precision.py"


TARGETS += [
    f"{RESULTS}/tables/{table}.csv"
    for table in ("statements", "tab02_norm_inequalities", "precision")
]


rule bounds:
    """Printed, corrected and tight bounds against exact norms: random models, the runs' checkpoints; Lanczos beside."""
    input:
        data=f"{RESULTS}/data/mnist.npz",
        batch=f"{RESULTS}/subsets/mnist_seed{DATASETS['mnist']['hessian']['batch_seed']}.npz",
        checkpoints=[checkpoint(BOUNDS_RUN, stage) for stage in ("init", "trained")],
        hessians=[hessian(BOUNDS_RUN, stage) for stage in ("init", "trained")],
        code=code("bounds"),
    output:
        table=f"{RESULTS}/tables/bounds.csv",
        latex=f"{RESULTS}/tables/bounds.tex",
        baselines=f"{RESULTS}/tables/bound_baselines.csv",
        baselines_latex=f"{RESULTS}/tables/bound_baselines.tex",
        timing=timing("bounds"),
    log:
        log_file("bounds"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=4000,
    params:
        run=BOUNDS_RUN,
        theory=SETTINGS["theory"],
        architecture=DATASETS["mnist"]["architecture"],
        hessian=DATASETS["mnist"]["hessian"],
        lock=LOCK_HASH,
    script:
        "../scripts/bounds.py"


rule bound_validation:
    """Is any tight bound ever below the exact norm?"""
    input:
        code=code("bound_validation"),
    output:
        table=f"{RESULTS}/tables/bound_validation.csv",
        latex=f"{RESULTS}/tables/bound_validation.tex",
        timing=timing("bound_validation"),
    log:
        log_file("bound_validation"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=3000,
    params:
        theory=SETTINGS["theory"],
        lock=LOCK_HASH,
    script:
        "../scripts/bound_validation.py"


TARGETS += [
    f"{RESULTS}/tables/{table}.csv"
    for table in ("bounds", "bound_validation", "bound_baselines")
]
