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
            directory("results/tables"),
            patterns=["{name}.md"],
            caption="../report/tables.rst",
            category="Tables",
            labels={"table": "{name}"},
        ),
    log:
        "logs/tables.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench table --config {input.config:q} --runs results/runs --scripted {input.scripted:q}"
        " --out {output:q} > {log:q} 2>&1"


rule figures:
    input:
        config=rules.study_config.output,
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        report(
            directory("results/figures"),
            patterns=["{name}.svg"],
            caption="../report/figures.rst",
            category="Figures",
            labels={"figure": "{name}"},
        ),
    log:
        "logs/figures.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench figure --config {input.config:q} --runs results/runs --out {output:q} > {log:q} 2>&1"


rule claims:
    input:
        config=rules.study_config.output,
        claims=Path(workflow.basedir) / "config" / "claims.yaml",
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        report(
            directory("results/claims"),
            patterns=["{name}.md"],
            caption="../report/claims.rst",
            category="Claims",
        ),
    log:
        "logs/claims.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench claims --claims {input.claims:q} --config {input.config:q} --runs results/runs"
        " --out {output:q} > {log:q} 2>&1"
