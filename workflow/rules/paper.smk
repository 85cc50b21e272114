# The paper: its text, and the tables and figures above; no number is written by hand.
rule paper:
    input:
        main=shipped("paper", "main.typ"),
        references=shipped("paper", "references.yml"),
        tables=[rules.tables.output, rules.claims.output, rules.compare.output],
        figures=rules.figures.output,
    output:
        report("results/paper/paper.pdf", caption="../report/paper.rst", category="Paper"),
    log:
        "logs/paper.log",
    conda:
        "../envs/cpu.yaml"
    params:
        source=subpath(input.main, parent=True),
    shell:
        "jetrl_bench paper --source {params.source:q} --tables results/tables --figures results/figures"
        " --out {output:q} > {log:q} 2>&1"
