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
        speed=rules.speed.output,
    output:
        directory("results/tables"),
    log:
        "logs/tables.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench table all --config {input.config:q} --runs results/runs --out {output:q} > {log:q} 2>&1"


rule figures:
    input:
        config=rules.study_config.output,
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        directory("results/figures"),
    log:
        "logs/figures.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench figure all --config {input.config:q} --runs results/runs --out {output:q} > {log:q} 2>&1"


rule claims:
    input:
        config=rules.study_config.output,
        claims=Path(workflow.basedir) / "config" / "claims.yaml",
        records=records("manifest.json", "train.jsonl"),
        evaluations=evaluations(RUNS.values()),
    output:
        "results/claims.json",
    log:
        "logs/claims.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench claims {input.claims:q} --config {input.config:q} --runs results/runs"
        " --out {output:q} > {log:q} 2>&1"
