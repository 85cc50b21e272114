# The supervised warm-up: one checkpoint per base index, shared by every method of its seeds.
rule base_config:
    output:
        "results/bases/{base}.json",
    log:
        "logs/base_config/{base}.log",
    localrule: True
    conda:
        "../envs/cpu.yaml"
    params:
        text=base_text,
    shell:
        "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"


rule base:
    input:
        settings=rules.base_config.output,
        pretrained=pretrained(),
    output:
        "state/base/{base}/base.json",
    log:
        "logs/base/{base}.log",
    priority: 80
    retries: 2
    conda:
        "../envs/cpu.yaml"
    resources:
        gpu=GPUS,
    shell:
        "jetrl_bench base --settings {input.settings:q} --out state/base/{wildcards.base}"
        " --gpus {resources.gpu} > {log:q} 2>&1"
