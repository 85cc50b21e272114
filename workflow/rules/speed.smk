# Measured on this machine, in CPU seconds, at a small fixed shape: a step of every configured method, by phase. Takes
# every core, so that nothing runs beside it, and comes last.
rule speed:
    input:
        config="results/config.json",
    output:
        json="results/speed.json",
        table=report("results/speed.md", caption="../report/speed.rst", category="Tables"),
    log:
        "logs/speed.log",
    priority: -1
    conda:
        "../envs/cpu.yaml"
    threads: workflow.cores or 1
    shell:
        "jetrl_bench speed step --config {input.config:q} --engines reference --device cpu --new-tokens 16 --pairs 3"
        " --out {output.json:q} > {log:q} 2>&1"
