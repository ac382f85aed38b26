"""Put the increments of all runs together, and answer how many samples a tolerance needs."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from dataclasses import asdict

    import numpy as np
    import pandas as pd

    from curvature_gap.loss_increments import COLUMNS, Measurement
    from curvature_gap.sample_size import SampleSize, sample_sizes
    from curvature_gap.tables import write_table

    for name in COLUMNS:
        frames = [pd.read_csv(path) for path in snakemake.input[name]]
        rows = [row for frame in frames for row in frame.to_dict("records")]
        write_table(rows, snakemake.output[name], columns=COLUMNS[name])
    answers = []
    for path in snakemake.input.measurements:
        measurement = Measurement.load(path)
        if len(measurement.losses):
            epsilons = np.geomspace(1e-1, 1e-5, 17)
            answers += [{"run": Path(path).stem, **asdict(answer)} for answer in sample_sizes(measurement, epsilons)]
    write_table(answers, snakemake.output.sample_size, columns=["run", *SampleSize.__dataclass_fields__])
