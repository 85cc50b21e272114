# The whole benchmark: data -> base -> train -> evaluate -> speed -> tables, figures, claims, paper.
#   snakemake --cores all                                        the default demonstration
#   snakemake --cores all --configfile config/smoke.yaml         two minutes
#   snakemake -n                                                 what would run, on any machine
# The steps stand in workflow/rules/, functions in common.smk alone. "Checkpoint" means a model's weights throughout,
# never Snakemake's keyword: the graph is known from the configuration.
from snakemake.utils import min_version

min_version("9.18")


report: "workflow/report/workflow.rst"


configfile: Path(workflow.basedir) / "config" / "config.yaml"


include: "workflow/rules/common.smk"


wildcard_constraints:
    method="|".join(map(re.escape, METHODS)),
    seed=r"\d+",
    digest="[0-9a-f]{12}",
    base="[0-9a-f]{12}",


include: "workflow/rules/data.smk"
include: "workflow/rules/base.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/speed.smk"
include: "workflow/rules/modelled.smk"
include: "workflow/rules/publish.smk"
include: "workflow/rules/paper.smk"


rule all:
    default_target: True
    input:
        rules.tables.output,
        rules.figures.output,
        rules.claims.output,
        rules.compare.output,
        rules.modelled.output,
        rules.paper.output,
        rules.speed.output,
