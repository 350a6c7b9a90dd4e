# As base.Dockerfile, and gIB, Google's plugin of NCCL for A3 Ultra and A4, with the tuning that it brings. NCCL drives their RoCE without it too.
#   make image FABRIC=gib IMAGE=registry.example.com/flotilla-gib:1
# https://github.com/GoogleCloudPlatform/container-engine-accelerators/tree/master/gpudirect-rdma: its installer, and where it leaves what
FROM us-docker.pkg.dev/gce-ai-infra/gpudirect-gib/nccl-plugin-gib:v1.1.0 AS gib
RUN /scripts/container_entry.sh install --install-nccl \
    && if [ -d /var/lib/gib ]; then cp -R /var/lib/gib /gib; else cp -R /usr/local/gib /gib; fi

FROM dstackai/base:0.16-base-ubuntu24.04
COPY --from=gib /gib /usr/local/gib
# Every job's shell is an interactive one, which reads this file: it sets NCCL_NET=gIB and what goes with it.
RUN echo '. /usr/local/gib/scripts/set_nccl_env.sh' >>/etc/bash.bashrc
ENV LD_LIBRARY_PATH=/usr/local/gib/lib64
# Below /opt every user may read, for flotilla:task.user; root's home is closed.
ENV UV_PYTHON_INSTALL_DIR=/opt/uv/python VIRTUAL_ENV=/opt/flotilla PATH=/opt/flotilla/bin:${PATH}
COPY gpu.txt /opt/flotilla/requirements.txt
RUN uv venv --python 3.11 --allow-existing "$VIRTUAL_ENV" \
    && uv pip install --no-cache --require-hashes --requirement "$VIRTUAL_ENV/requirements.txt" \
    && ray --version
