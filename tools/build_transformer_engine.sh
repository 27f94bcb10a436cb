#!/bin/sh
# tools/build_transformer_engine.sh PYTHON REQUIREMENT [PIP OPTION...]
#
# Installs TransformerEngine into the environment of PYTHON, which has a torch for CUDA 13. Its core is a wheel. Its
# extension for torch is compiled here by g++, with the CUDA headers of pip's packages: neither
# a CUDA toolkit nor a GPU is needed. MAX_JOBS bounds the number of compilers.
set -eu
python=$1 requirement=$2
shift 2
pip="$python -m pip install --quiet --disable-pip-version-check"
read -r cuda packages <<END
$("$python" -c 'import sysconfig, torch; print(torch.version.cuda, sysconfig.get_path("purelib"))')
END
$pip "$@" setuptools wheel pybind11 ninja
# The packages that torch needs have the other headers. Of nvcc the build asks for its version alone.
$pip --no-deps "nvidia-cuda-nvcc==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*"
export CUDA_HOME="$packages/nvidia/cu13" PATH="$(dirname "$python"):$PATH"
export CPATH="$packages/nvidia/cudnn/include:$packages/nvidia/nccl/include${CPATH:+:$CPATH}"
# Else the build asks github.com for a binary first, which for this torch is not there.
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE
$pip "$@" --no-build-isolation "$requirement"
