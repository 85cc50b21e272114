# Measured on this machine, in CPU seconds. Takes every core, so that nothing runs beside it, and comes last.
rule speed:
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
        "jetrl_bench speed step --pairs 3 --steps 3 --out {output.json:q} > {log:q} 2>&1"
