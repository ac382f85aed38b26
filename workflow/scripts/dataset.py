"""Fetch, verify and write one dataset; an optional one that is out of reach leaves a record of what was tried."""

import json

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap import data
    from curvature_gap.data_sources import prepare
    from curvature_gap.downloads import DatasetUnavailable
    from curvature_gap.files import atomic_path

    settings = snakemake.params.settings
    size = {key: settings["architecture"][key] for key in ("image_size", "channels", "classes")}
    try:
        dataset = prepare(settings["source"], name=snakemake.params.name, path=settings["path"], **size)
    except DatasetUnavailable as error:
        if not settings["optional"]:
            raise
        log.warning("%s", error)
        dataset = data.unavailable(snakemake.params.name, str(error), attempts=error.attempts, **size)
    data.write_prepared(dataset, snakemake.output.data)
    # `at_hand` as it was for this run: the workflow compares with it and so does not take a download for added data.
    record = data.describe(dataset) | {"at_hand": snakemake.params.at_hand}
    with atomic_path(snakemake.output.record) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
