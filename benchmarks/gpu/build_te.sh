#!/bin/sh
# build_te.sh PYTHON OUT: TransformerEngine 2.11.0 for the torch of PYTHON, as a folder for PYTHONPATH.
# PYTHON: 3.12 with torch 2.11.0, wheel, setuptools, pybind11, ninja. Needs g++, and nvcc's headers (CUDA_TOOLKIT). Two
# cores take a quarter of an hour.
set -eu
python=$1 out=$2 version=2.11.0
toolkit=${CUDA_TOOLKIT:-/usr/local/cuda-13.0}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$("$python" -P -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
mkdir -p "$work/cuda/include" "$out"
ln -s "$toolkit/bin" "$work/cuda/bin"
cp -rs "$site"/cu13/include/* "$work/cuda/include/"
cp -rsn "$toolkit"/include/cccl "$toolkit"/include/crt "$work/cuda/include/" || true
export CUDA_HOME="$work/cuda" NVTE_CUDA_INCLUDE_PATH="$work/cuda/include" NVTE_FRAMEWORK=pytorch
export NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-2}" PATH="$(dirname "$python"):$PATH"
export CPATH="$site/cudnn/include:$site/nccl/include:$work/cuda/include/cccl"
pip="$python -m pip --disable-pip-version-check"
(cd "$work" && $pip download -q --no-deps --no-build-isolation --no-binary :all: "transformer_engine_torch==$version" &&
    tar -xzf transformer_engine_torch-*.tar.gz && cd transformer_engine_torch-"$version" &&
    sed -i 's/"-O3"/"-O1"/' build_tools/pytorch.py && "$python" setup.py -q bdist_wheel -d "$work/wheels")
$pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 -d "$work/wheels" \
    "transformer_engine_cu13==$version" "transformer_engine==$version"
$pip download -q --no-deps -d "$work/wheels" importlib_metadata
for wheel in "$work"/wheels/*.whl; do (cd "$out" && unzip -q -o "$wheel"); done
find "$out" -name 'transformer_engine_torch*.so' -exec strip --strip-unneeded {} +
