"""Fetch, verify and write one dataset; an optional one that is out of reach leaves a record of what was tried."""

import json

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap import data
    from curvature_gap.files import atomic_path

    settings = snakemake.params.settings
    size = {key: settings["architecture"][key] for key in ("image_size", "channels", "classes")}
    try:
        dataset = data.prepare(settings["source"], path=settings["path"], **size)
    except data.DatasetUnavailable as error:
        if not settings["optional"]:
            raise
        log.warning("%s", error)
        dataset = data.unavailable(snakemake.params.name, str(error), **size)
    data.write_prepared(dataset, snakemake.output.data)
    with atomic_path(snakemake.output.record) as temporary:
        temporary.write_text(json.dumps(data.describe(dataset), indent=1) + "\n", encoding="utf-8")
