# One job per method and seed. Its input is the file of resolved settings: a comment in the configuration retrains
# nothing, a changed value gives another digest, and so another run. Resumable state stands in state/<digest>/, which is
# no output, so that neither a retry nor a kill loses it.
rule run_config:
    output:
        f"{RUN}/settings.json",
    log:
        "logs/run_config/{method}/seed{seed}-{digest}.log",
    localrule: True
    conda:
        "../envs/cpu.yaml"
    params:
        text=settings_text,
    shell:
        "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"


rule train:
    input:
        settings=rules.run_config.output,
        base=base_of,
    output:
        manifest=f"{RUN}/manifest.json",
        train=f"{RUN}/train.jsonl",
        timing=f"{RUN}/timing.jsonl",
        config=f"{RUN}/checkpoint/config.json",
        weights=f"{RUN}/checkpoint/model.safetensors",
    log:
        "logs/train/{method}/seed{seed}-{digest}.log",
    priority: 40
    retries: 2
    conda:
        "../envs/cpu.yaml"
    resources:
        gpu=GPUS,
    params:
        folder=subpath(output.manifest, parent=True),
        base=subpath(input.base, parent=True),
    shell:
        "jetrl_bench train --settings {input.settings:q} --method {wildcards.method} --base {params.base:q}"
        " --out {params.folder:q} --state state/{wildcards.digest} > {log:q} 2>&1"
