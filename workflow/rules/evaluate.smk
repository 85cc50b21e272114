# One process for all checkpoints of a method, and one for each warm-up checkpoint (the step-0 row of every arm).
rule evaluate_config:
    output:
        "results/evaluate.json",
    log:
        "logs/evaluate_config.log",
    localrule: True
    conda:
        "../envs/cpu.yaml"
    params:
        text=plan.evaluate_text(CONFIG),
    shell:
        "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"


rule scripted:
    input:
        config=rules.evaluate_config.output,
        data=rules.data.output,
    output:
        directory("results/scripted"),
    log:
        "logs/scripted.log",
    priority: 70
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench evaluate --scripted {output:q} --config {input.config:q} --data data > {log:q} 2>&1"


rule evaluate_base:
    input:
        config=rules.evaluate_config.output,
        data=rules.data.output,
        base=rules.base.output,
        settings=settings_on_base,
    output:
        "results/bases/{base}.evaluated",
    log:
        "logs/evaluate_base/{base}.log",
    priority: 70
    conda:
        "../envs/cpu.yaml"
    resources:
        gpu=GPUS,
    shell:
        "jetrl_bench evaluate {input.settings:q} --checkpoint base --config {input.config:q}"
        " --data data --bases state/base --cache state/evaluate > {log:q} 2>&1 && touch {output:q}"


for method in METHODS:

    rule:
        name:
            f"evaluate_{method}"
        input:
            config=rules.evaluate_config.output,
            data=rules.data.output,
            bases=ancient(expand(rules.evaluate_base.output, base=bases_of(method))),
            settings=[f"{run.folder}/settings.json" for run in runs_of(method)],
            manifests=[f"{run.folder}/manifest.json" for run in runs_of(method)],
            weights=[f"{run.folder}/checkpoint/model.safetensors" for run in runs_of(method)],
        output:
            evaluations(runs_of(method)),
        log:
            f"logs/evaluate/{method}.log",
        priority: 60
        conda:
            "../envs/cpu.yaml"
        resources:
            gpu=GPUS,
        shell:
            "jetrl_bench evaluate {input.settings:q} --config {input.config:q}"
            " --data data --bases state/base --cache state/evaluate > {log:q} 2>&1"
