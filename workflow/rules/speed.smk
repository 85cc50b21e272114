# Measured on this machine, in CPU seconds. Takes every core, so that nothing runs beside it.
rule speed:
    input:
        records("manifest.json"),
    output:
        "results/speed.json",
    log:
        "logs/speed.log",
    conda:
        "../envs/cpu.yaml"
    threads: workflow.cores
    shell:
        "jetrl_bench speed --out {output:q} > {log:q} 2>&1"
