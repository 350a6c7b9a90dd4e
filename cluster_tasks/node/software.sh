# shellcheck shell=bash
# Python and Ray for the node agent, in an image that the task names. The task sources it, so that its PATH stays:
#   . node/software.sh IMAGE ray    IMAGE contains both (flotilla:task.image_has_ray)
#   . node/software.sh IMAGE        where there is no Ray, requirements.txt, the lock, is installed

flotilla_refuse() {
  echo "node: image $*" >&2
  exit 2
}

flotilla_install() {
  local folder venv pythons
  folder=$(cd "${BASH_SOURCE[0]%/*}" && pwd) # dstack made it for whoever runs this, and every user may read it
  venv=$folder/.venv pythons=$folder/.python
  if [ -w /opt/uv/python ]; then # dstack's own image has them there
    pythons=/opt/uv/python
  fi
  if command -v uv >/dev/null; then
    UV_PYTHON_INSTALL_DIR=$pythons uv venv --quiet --python 3.11 "$venv" &&
      uv pip install --quiet --python "$venv/bin/python" --requirement requirements.txt
  elif python3 -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --requirement requirements.txt
  else
    flotilla_refuse "$1 has no Ray, and neither uv nor a Python 3.11 to 3.13 with venv to install it; take one that has (images/ makes them)"
  fi || flotilla_refuse "$1: the locked requirements could not be installed, see above; take an image with them (images/ makes them)"
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
}

flotilla_software() {
  local program missing=()
  for program in python3 ray; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    return
  elif [ "${2-}" != ray ]; then
    flotilla_install "$1"
  else
    flotilla_refuse "$1 has no ${missing[*]} on PATH, but is said to contain Ray; build it in (images/ does)," \
      "or set flotilla:task.image_has_ray: false, and nodes install the locked requirements"
  fi
}

flotilla_software "$@"
