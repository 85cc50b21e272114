# Tables, figures and claims: drawn from records alone.
rule study_config:
    output:
        "results/config.json",
    log:
        "logs/study_config.log",
    localrule: True
    conda:
        "../envs/cpu.yaml"
    params:
        text=plan.config_text(CONFIG),
    shell:
        "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"


rule tables:
    input:
        config=rules.study_config.output,
        records=records("manifest.json", "train.jsonl", "timing.jsonl"),
        evaluations=evaluations(RUNS.values()),
        scripted=rules.scripted.output,
    output:
        report(
            expand("results/tables/{name}.md", name=TABLES),
            caption="../report/tables.rst",
            category="Tables",
        ),
        expand("results/tables/{name}.{kind}", name=TABLES, kind=["csv", "tex"]),
    log:
        "logs/tables.log",
    priority: 10
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench table --config {input.config:q} --runs results/runs --scripted {input.scripted:q}"
        " --out results/tables > {log:q} 2>&1"


rule figures:
    input:
        config=rules.study_config.output,
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        report(
            expand("results/figures/{name}.svg", name=FIGURES),
            caption="../report/figures.rst",
            category="Figures",
        ),
        expand("results/figures/{name}.{kind}", name=FIGURES, kind=["pdf", "png", "csv"]),
    log:
        "logs/figures.log",
    priority: 10
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench figure --config {input.config:q} --runs results/runs --out results/figures > {log:q} 2>&1"


rule claims:
    input:
        config=rules.study_config.output,
        claims=shipped("config", "claims.yaml"),
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        report("results/tables/claims.md", caption="../report/claims.rst", category="Claims"),
        expand("results/tables/claims.{kind}", kind=["csv", "tex"]),
    log:
        "logs/claims.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench claims --claims {input.claims:q} --config {input.config:q} --runs results/runs"
        " --out results/tables > {log:q} 2>&1"


rule compare:
    input:
        config=rules.study_config.output,
        published=shipped("results", "published.yaml"),
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        report(
            expand("results/tables/{name}.md", name=["published", "comparison"]),
            caption="../report/compare.rst",
            category="Tables",
        ),
        expand("results/tables/{name}.{kind}", name=["published", "comparison"], kind=["csv", "tex"]),
    log:
        "logs/compare.log",
    conda:
        "../envs/cpu.yaml"
    params:
        runs=RECORDS,
    shell:
        "{{ jetrl_bench published --published {input.published:q} --out results/tables"
        " && jetrl_bench compare {params.runs:q} --published {input.published:q} --config {input.config:q}"
        " --out results/tables; }} > {log:q} 2>&1"
