# dstack's own image, and in it Ray, vLLM and what else the trainer needs, as locked. NCCL finds InfiniBand and RoCE by libibverbs.
#   make image FABRIC=base IMAGE=registry.example.com/flotilla:1
FROM dstackai/base:0.16-base-ubuntu24.04
# Below /opt every user may read, for flotilla:task.user; root's home is closed.
ENV UV_PYTHON_INSTALL_DIR=/opt/uv/python VIRTUAL_ENV=/opt/flotilla PATH=/opt/flotilla/bin:${PATH}
COPY gpu.txt /opt/flotilla/requirements.txt
RUN uv venv --python 3.11 --allow-existing "$VIRTUAL_ENV" \
    && uv pip install --no-cache --require-hashes --requirement "$VIRTUAL_ENV/requirements.txt" \
    && ray --version
