#!/usr/bin/env bash
# Installs what the tests of `launch slurm` and `launch nemo` need of Debian or Ubuntu: a SLURM with accounting. And
# the checker of shell scripts. Needs root. Without them those tests are skipped; nothing else uses them.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet
apt-get install --yes --quiet --no-install-recommends \
  slurm-wlm slurm-wlm-basic-plugins munge slurmdbd mariadb-server shellcheck
