# Modelled time on hardware that is not here: speed-ups, figures, and the model against published measurements.
rule modelled:
    output:
        report(
            expand("results/modelled/modelled_{name}.svg", name=MODELLED),
            caption="../report/modelled.rst",
            category="Modelled",
        ),
        expand("results/modelled/modelled_{name}.{kind}", name=MODELLED, kind=["pdf", "png", "csv"]),
        expand("results/modelled/modelled_speedups.{kind}", kind=["md", "csv"]),
        expand("results/modelled/validation.{kind}", kind=["txt", "json"]),
    log:
        "logs/modelled.log",
    conda:
        "../envs/cpu.yaml"
    shell:
        "{{ jetrl_bench simulate --figures results/modelled && jetrl_bench simulate --validate"
        " --text results/modelled/validation.txt --json results/modelled/validation.json; }} > {log:q} 2>&1"
