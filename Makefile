# make train: install into .venv and run the main job on its defaults.   make train ARGS="train.steps=20"
# make test:  install what the tests need and run them.                  make test PYTEST_ARGS="-m 'not slow and not nightly'"
# make test-all: with the nightly ones: longer series of what `make test` runs one or a few of, and other libraries.
# make coverage: the lines and branches that `make test` reaches, as a table and as pages in build/coverage.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

.PHONY: train test test-all coverage lint docs docs-reference bench bench-balance bench-sync bench-speedup bench-peers bench-outer gpu gpu-node gpu-wheels clean

train: $(VENV)/.installed
	$(BIN)/launch train $(ARGS)

PYTEST = -m pytest -n 6 --no-loadscope-reorder
test: lint tools
	$(BIN)/python $(PYTEST) -m "not nightly" $(PYTEST_ARGS)

test-all: lint tools $(VENV)/.installed-peers $(VENV)/.installed-nightly
	$(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# Measured: pytest, and what tests/infra/warm.py forks. Not: workers that are executed, whose environment is limited.
# -i: files that tests wrote for themselves have no source any more.
coverage: export COVERAGE_FILE = $(CURDIR)/build/coverage/data
coverage: $(VENV)/.installed-dev tools
	rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/python -m coverage run $(PYTEST) -m "not nightly" $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage html -i -q -d build/coverage
	$(BIN)/python -m coverage report -i --skip-covered

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site in build/site, for reading without a network; tests/test_docs.py builds it, too.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open build/site/index.html."

# What is generated in docs/; tests/test_docs.py fails if it is not up to date.
docs-reference: $(VENV)/.installed
	$(BIN)/python docs/configuration.py
	$(BIN)/python docs/assets/make_timelines.py
	$(BIN)/python docs/outputs.py

bench: $(VENV)/.installed
	$(BIN)/launch run -- jobs/bench.py

# Time and padding of batch.balance=length against the order of the data: docs/development/benchmarks.md. 10 minutes.
BALANCE = $(BIN)/launch run cluster.workers_per_node=$(1) -- jobs/bench_balance.py $(2)
bench-balance: $(VENV)/.installed
	$(call BALANCE,2,)
	$(call BALANCE,2,--strategy fsdp --sync every)
	$(call BALANCE,4,)
	$(call BALANCE,4,--strategy fsdp --sync every)

# Two shaped hosts on this machine (needs root and iproute2): docs/explanations/sync.md and sync.png are made of it. 20 minutes.
HOSTS = $(BIN)/python -m tests.infra.hosts --rate $(1) -- $(BIN)/launch run cluster=hosts cluster.nodes=2 \
	cluster.rendezvous={first}:29400 cluster.workers_per_node=$(2) run.dir=build/$@ --
ON_HOSTS = $(call HOSTS,$(1),$(2)) jobs/bench_sync.py measure --rate $(1) --out build/sync.jsonl
bench-sync: $(VENV)/.installed-dev tools
	mkdir -p build && rm -f build/sync.jsonl
	$(call ON_HOSTS,1gbit,1)
	$(call ON_HOSTS,1gbit,2)
	$(call ON_HOSTS,100mbit,1)
	$(call ON_HOSTS,100mbit,2)
	$(BIN)/python jobs/bench_sync.py report --results build/sync.jsonl --to docs/explanations

# On the same hosts: the printed speed-up against that of two whole runs. 15 minutes.
bench-speedup: $(VENV)/.installed-dev tools
	for rate in 1gbit 100mbit; do \
		$(call HOSTS,$$rate,1) jobs/bench_speedup.py --rate $$rate || exit 1; done

# The engine beside other libraries, here and on the same hosts: docs/explanations/peers.md and peers.png. 16 minutes.
# A cell takes rounds of all contenders for this many seconds, and at least three.
PEERS = jobs/bench_peers.py measure --setting "$(1)" --out build/peers.jsonl --seconds $(2) --accumulation $(3)
bench-peers: $(VENV)/.installed-peers tools
	mkdir -p build && rm -f build/peers.jsonl
	$(BIN)/launch run cluster.workers_per_node=2 -- $(call PEERS,one-machine,20,1 2 4 8 16) --uneven
	$(BIN)/launch run cluster.workers_per_node=2 -- $(call PEERS,tiny model,10,8) --width 32 --depth 1 --seq-len 16
	$(call HOSTS,1gbit,1) $(call PEERS,1gbit,6,1 4 16)
	$(BIN)/python jobs/bench_peers.py report --results build/peers.jsonl --to docs/explanations

# Outer steps beside the synchronous job: here, and of the default model on the same hosts: docs/explanations/outer.md. 40 minutes.
OUTER = $(BIN)/python jobs/outer.py --out build/outer.jsonl
FAR = --tasks bytes_gpt --rates 10mbit
OF_FAR = -- task.width=128 task.seq_len=128 task.eval_samples=512
bench-outer: $(VENV)/.installed-dev tools
	mkdir -p build && rm -f build/outer.jsonl
	$(OUTER) --seeds 3
	$(OUTER) $(FAR) --ways synchronous streaming $(OF_FAR) train.steps=60
	$(OUTER) $(FAR) --ways streaming --rates 1gbit 100mbit $(OF_FAR) train.steps=60
	$(OUTER) $(FAR) --ways synchronous streaming --round-trip-ms 50 --loss 0.01 $(OF_FAR) train.steps=60
	$(OUTER) $(FAR) --ways streaming --sites 3 $(OF_FAR) batch.global_size=48 outer.delay=8

# The system tests make hosts of their own, and a Slurm cluster of them; where these are missing they skip, and say so.
# Whether apt-get can start the daemons as services does not matter: the tests start their own.
# zsh and fish: tests of their completion; sshd: tests of cluster.login
TOOLS = ip slurmctld slurmd munged sbatch zsh fish sshd ssh
.PHONY: tools
tools:
	@PATH="$$PATH:/usr/sbin:/sbin"; there() { for tool in $(TOOLS); do command -v $$tool >/dev/null || return 1; done; }; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! there; then \
		apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			iproute2 slurm-wlm munge zsh fish openssh-server openssh-client >/dev/null; there || echo "still missing: some of $(TOOLS)" >&2; fi

# What tests/extensions/page/test_page_browser.py needs; without it these tests are skipped.
.PHONY: browser
browser:
	command -v chromium >/dev/null || apt-get install -y -qq --no-install-recommends chromium >/dev/null
	mkdir -p build && npm install --silent --no-save --prefix build axe-core@4

# Every CUDA path that one GPU allows, on a machine that has torch and needs no network: a table of checks, bounds and figures.
# In three parts, each with at most 8 minutes of checks after it has installed the wheels: make gpu PART=1, then 2 and 3. GPU_DEVICE=cpu runs what a CPU can.
# make gpu-wheels, on a connected machine, makes the folder that `make gpu` installs from: carry it along with the tree.
# make gpu-node, on a host with 8 GPUs, starts what one GPU cannot: jobs of 2, 4 and 8 ranks over NCCL, and drills.
GPU_WHEELS ?= build/gpu-wheels
GPU_PYTHON ?= 3.12
GPU_DEVICE ?= cuda
GPU_ARGS ?=
PART ?=
GPU_RUN = $(PYTHON) jobs/gpu/wheels.py install $(GPU_WHEELS) build/gpu-site && \
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-site $(PYTHON) -m jobs.gpu.acceptance --device $(GPU_DEVICE)
gpu:
	$(GPU_RUN) $(if $(PART),--part $(PART)) $(GPU_ARGS)

gpu-node:
	$(GPU_RUN) --part node $(GPU_ARGS)

gpu-wheels: $(VENV)/.installed-dev
	$(BIN)/python -m jobs.gpu.wheels make $(GPU_WHEELS) --python $(GPU_PYTHON)

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "launcher needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install -q -c constraints.txt torch numpy
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed-docs

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

# torchtitan asks for datasets before 4.8, which it only reads data with; this project has a newer one
$(VENV)/.installed-peers: $(VENV)/.installed-dev
	$(BIN)/pip install -q -c constraints.txt -e '.[peers]'
	$(BIN)/pip install -q -c constraints.txt --no-deps torchtitan
	@touch $@

# the package mlflow, whose server the nightly tests start, asks for an older pyarrow than datasets here has
$(VENV)/.installed-nightly: $(VENV)/.installed-dev
	$(BIN)/pip install -q -c constraints.txt -e '.[nightly]'
	$(BIN)/pip install -q -c constraints.txt --no-deps mlflow
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
