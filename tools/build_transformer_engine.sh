#!/bin/sh
# tools/build_transformer_engine.sh PYTHON REQUIREMENT [PIP OPTION...]
#
# Installs TransformerEngine into the environment of PYTHON, which has a torch for CUDA 13. Its core is a wheel. Its
# extension for torch is compiled here by g++, with the CUDA headers of pip's packages: neither
# a CUDA toolkit nor a GPU is needed. MAX_JOBS bounds the number of compilers. With QUICK=1 the extension is compiled as
# one file and not optimised, in a minute or two instead of many: for tests that compute nothing with it.
set -eu
python=$1 requirement=$2
shift 2
pip="$python -m pip install --quiet --disable-pip-version-check"
read -r cuda packages <<END
$("$python" -P -c 'import sysconfig, torch; print(torch.version.cuda, sysconfig.get_path("purelib"))')
END
$pip "$@" setuptools wheel pybind11 ninja
# The packages that torch needs have the other headers. Of nvcc the build asks for its version alone.
$pip --no-deps "nvidia-cuda-nvcc==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
export CUDA_HOME="$packages/nvidia/cu13" PATH="$(dirname "$python"):$PATH"
export CPATH="$packages/nvidia/cudnn/include:$packages/nvidia/nccl/include${CPATH:+:$CPATH}"
# Else the build asks github.com for a binary first, which for this torch is not there.
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE
if [ "${QUICK:-}" = 1 ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    "$python" -P -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
        -d "$folder" "transformer-engine-torch==${requirement##*==}"
    tar -xzf "$folder"/*.tar.gz -C "$folder" && rm "$folder"/*.tar.gz
    source=$(echo "$folder"/*)
    sed -i 's/"-O3"/"-O0"/' "$source/build_tools/pytorch.py"
    # The one that lets names of torch's indices into the whole file comes last.
    (cd "$source/csrc" && for file in $(find . -name '*.cpp' ! -name comm_gemm_overlap.cpp) \
        ./extensions/comm_gemm_overlap.cpp; do
        mv "$file" "${file%.cpp}.inc" && echo "#include \"${file%.cpp}.inc\"" >>all.cpp
    done)
    $pip "$@" --no-build-isolation "$source"
fi
$pip "$@" --no-build-isolation "$requirement"
