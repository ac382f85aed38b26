# The artifact of "Closing the Curvature Gap": every table, figure and verdict of the paper.
#
#   snakemake --cores all                              the preset named in config/config.yaml
#   snakemake --cores all --config preset=smoke        three minutes, no network
#   snakemake --cores all data                         fetch and verify the data, then work offline
#   snakemake --cores all verify                       decide every claim; non-zero exit when one fails
configfile: "config/config.yaml"


TARGETS = []  # what `all` asks for; each file below adds its own


include: "workflow/rules/common.smk"
include: "workflow/rules/functions.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/training.smk"
include: "workflow/rules/hessian.smk"
include: "workflow/rules/tiles.smk"
include: "workflow/rules/theory.smk"
include: "workflow/rules/experiments.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/verdict.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        TARGETS,
