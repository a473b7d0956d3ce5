# slimstate on a GPU:
#   docker build --tag slimstate .
#   docker run --gpus all --volume "$PWD:/work" slimstate inspect /work/MODEL
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# Triton compiles its launchers with a C compiler when a kernel first runs
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

COPY . /opt/slimstate
RUN pip install --no-cache-dir '/opt/slimstate[fla,eval,recover,report]'

# kernels that were compiled once, and models from the hub, outlive a container in a volume mounted at /cache
ENV TRITON_CACHE_DIR=/cache/triton HF_HOME=/cache/huggingface
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["slimstate"]
CMD ["--help"]
