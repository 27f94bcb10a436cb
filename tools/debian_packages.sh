#!/usr/bin/env bash
# Installs what the tests of `launch slurm` and `launch nemo` need on Debian or Ubuntu: SLURM with accounting, and
# the checker of shell scripts. Needs root. Without it those tests are skipped.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet
apt-get install --yes --quiet --no-install-recommends \
  slurm-wlm slurm-wlm-basic-plugins munge slurmdbd mariadb-server shellcheck
