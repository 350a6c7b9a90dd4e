# dstack's image with EFA (libfabric, the plugin of NCCL), and in it Ray, vLLM and what else the trainer needs, as locked.
#   make image FABRIC=efa IMAGE=registry.example.com/flotilla-efa:1
FROM dstackai/base:0.16-devel-efa-ubuntu24.04
# Below /opt every user may read, for flotilla:task.user; root's home is closed.
ENV UV_PYTHON_INSTALL_DIR=/opt/uv/python VIRTUAL_ENV=/opt/flotilla PATH=/opt/flotilla/bin:${PATH}
COPY gpu.txt /opt/flotilla/requirements.txt
RUN uv venv --python 3.11 --allow-existing "$VIRTUAL_ENV" \
    && uv pip install --no-cache --require-hashes --requirement "$VIRTUAL_ENV/requirements.txt" \
    && ray --version \
    && fi_info --version \
    && ldconfig -p | grep -q libnccl-net
