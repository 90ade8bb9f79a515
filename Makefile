# make test [PLATFORM=mindspore]          all tests, or those of one backend, with coverage
# make test-npu                           those of torch-npu, on simulated NPUs
# make readme-table                       the README's table of backends, from the last run of the tests
# make demo [PLATFORM=mindspore] [TP=2]   train a small Llama on TP processes
# make bench [CASES=mlp] [OUT=NAME]       measure costs, under benchmarks/results/; minutes, on an idle machine
# make lint                               ruff and mypy
# make clean                              remove environments and build output
#
# Each target makes the virtual environment it needs under .venv/, and makes it again when its requirements change.
# PYTHON chooses the interpreter, PIP_ARGS goes to every `pip install`.

PYTHON := python3
PLATFORM :=
TP := 2
PIP_ARGS :=

# The backends that need nothing but a CPU, and all that have a folder of requirements.
CPU_PLATFORMS := torch-cpu mindspore
PLATFORMS := $(patsubst platform/%/requirements.txt,%,$(wildcard platform/*/requirements.txt))

ifneq ($(filter-out $(PLATFORMS),$(PLATFORM)),)
$(error PLATFORM=$(PLATFORM) is none of: $(PLATFORMS))
endif

DEMO_PLATFORM := $(or $(PLATFORM),torch-cpu)

# Without a GPU the tests of torch-cuda use fake tensors, for which the torch of torch-cpu will do.
ENVIRONMENT := $(PLATFORM)
ifeq ($(PLATFORM)$(shell command -v nvidia-smi),torch-cuda)
ENVIRONMENT := torch-cpu
endif

.PHONY: test test-npu readme-table demo bench lint clean

ifeq ($(PLATFORM),)
# torch-npu has no wheels for some machines: there the gate says so, and fails when CI is set.
test:
	@$(MAKE) --no-print-directory -j2 -k .venv/all/.ready .venv/torch-npu/.ready || echo "an environment is missing: see above"
	@$(MAKE) --no-print-directory .venv/all/.ready
	PYTHON=$(CURDIR)/.venv/all/bin/python PYTHON_NPU=$(CURDIR)/.venv/torch-npu/bin/python ci/all
else
test: .venv/$(ENVIRONMENT)/.ready
	PYTHON=$(CURDIR)/.venv/$(ENVIRONMENT)/bin/python ci/$(PLATFORM)
endif

test-npu:
	@$(MAKE) --no-print-directory test PLATFORM=torch-npu

readme-table:
	$(PYTHON) ci/table.py

# Without CANN, NPUs are simulated.
DEMO_PYTHON := .venv/$(DEMO_PLATFORM)/bin/python
ifeq ($(DEMO_PLATFORM)$(ASCEND_HOME_PATH),torch-npu)
DEMO_PYTHON += -m tests.simulated_npu run $(DEMO_PYTHON)
endif
demo: .venv/$(DEMO_PLATFORM)/.ready
	HYPER_PARALLEL_PLATFORM=$(DEMO_PLATFORM) $(DEMO_PYTHON) examples/train_llama/train.py --tp $(TP)

CASES :=
OUT := benchmarks/results/$(shell date +%F)-$(shell uname -m)-$(shell getconf _NPROCESSORS_ONLN)-cores
bench: .venv/all/.ready
	HYPER_PARALLEL_PLATFORM=torch-cpu .venv/all/bin/python -m benchmarks $(CASES) --out $(OUT)

lint: .venv/lint/.ready
	.venv/lint/bin/ruff check .
	.venv/lint/bin/mypy

clean:
	rm -rf .venv build

# $(call environment,NAME,REQUIREMENT FILES,FURTHER ARGUMENTS OF PIP): a rule for .venv/NAME.
# The file .ready is newer than the requirements exactly when the environment fits them.
define environment
.venv/$(1)/.ready: $(2) pyproject.toml
	$(PYTHON) -m venv .venv/$(1)
	.venv/$(1)/bin/python -m pip install --quiet $(PIP_ARGS) $(addprefix -r ,$(2)) $(3)
	touch $$@
endef

requirements = $(patsubst %,platform/%/requirements.txt,$(1)) ci/requirements-test.txt
$(eval $(call environment,all,$(call requirements,$(CPU_PLATFORMS)),-e .))
$(foreach name,$(PLATFORMS),$(eval $(call environment,$(name),$(call requirements,$(name)),-e .)))
$(eval $(call environment,lint,ci/requirements-lint.txt,))
