#!/usr/bin/env bash
# Installs what some tests need on Debian or Ubuntu: for `launch slurm` and `launch nemo` SLURM with accounting and the
# checker of shell scripts, for the reward `code` bubblewrap, for the page of `report` Chromium. Needs root. Without it
# those tests are skipped.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet
apt-get install --yes --quiet --no-install-recommends \
  slurm-wlm slurm-wlm-basic-plugins munge slurmdbd mariadb-server shellcheck bubblewrap chromium
