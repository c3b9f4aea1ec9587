# Quire for CPUs in a small image.   docker build -t quire . && docker run -p 8000:8000 quire
# A model of your own:   docker run -p 8000:8000 -v /srv/models:/models:ro quire serve /models/NAME
# One from the hub, kept: docker run -p 8000:8000 -v quire-cache:/var/cache/quire quire serve org/name
# The same commit gives the same image, byte for byte, where the builder sets the files' times (and the base and apt are the same):
#   SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) docker buildx build --output type=docker,rewrite-timestamp=true -t quire .
#   buildah bud --build-arg SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) --timestamp $(git log -1 --format=%ct) -t quire .
# What is in it: /usr/share/doc/quire/sbom.spdx.json.
# Works with --read-only, --cap-drop ALL and any --user: nothing is written.
# For NVIDIA GPUs, with what of CUDA is needed (the host brings the driver, 580 or newer, and NVIDIA's container toolkit):
#   docker build --target gpu -t quire-gpu . && docker run --gpus all -p 8000:8000 quire-gpu serve org/name
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
COPY scripts/install-deps /src/scripts/install-deps
RUN /src/scripts/install-deps
COPY . /src
# Beside the installation, the names of the packages that hold the libraries it needs: they differ between releases.
RUN cd /src && make -j"$(nproc)" && make install DESTDIR=/out PREFIX=/usr && strip /out/usr/bin/quire && \
    mkdir /out/tmp && cp deploy/make-sbom /out/tmp/ && build/quire version | cut -d " " -f 2 >/out/tmp/version && \
    ldd /out/usr/bin/quire | awk '$2 == "=>" {print $3}' | xargs -n 1 readlink -f | \
    while read -r file; do dpkg -S "*/${file##*/}" | cut -d : -f 1 | head -1; done | sort -u >/out/tmp/packages && \
    rm -rf /out/usr/share/man /out/usr/share/zsh /out/usr/share/bash-completion

FROM ${BASE} AS cpu
ARG SOURCE_DATE_EPOCH
COPY --from=build /out/tmp /tmp/quire
RUN apt-get update && xargs -a /tmp/quire/packages apt-get install -y --no-install-recommends ca-certificates && \
    install -d -o 10001 -g 10001 /var/cache/quire && install -d /usr/share/doc/quire && \
    /tmp/quire/make-sbom "$(cat /tmp/quire/version)" >/usr/share/doc/quire/sbom.spdx.json && apt-get clean && \
    rm -rf /var/lib/apt/lists/* /var/cache/debconf/* /var/cache/ldconfig/aux-cache /var/log/* /tmp/quire
COPY --from=build /out/usr /usr
COPY --from=build /out/etc/quire /etc/quire
ENV QUIRE_HOST=0.0.0.0 HF_HOME=/var/cache/quire
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["quire", "health"]
ENTRYPOINT ["quire"]
CMD ["serve"]

# The compiler and the libraries come as Python wheels; only two libraries and the plugin go on.
FROM build AS build-gpu
ARG CUDA_ARCHS="sm_80 sm_86 sm_89 sm_90a sm_100 sm_120"
ARG CUDA_PTX="compute_80 compute_90"
ENV CUDA_HOME=/opt/cuda/nvidia/cu13
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-pip && \
    python3 -m pip install --no-cache-dir --no-compile --target /opt/cuda "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" \
        "nvidia-nvvm==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cublas==13.1.*" "nvidia-nccl-cu13==2.28.*" && \
    ln -s lib $CUDA_HOME/lib64 && ln -s libcublasLt.so.13 $CUDA_HOME/lib/libcublasLt.so && \
    cp /opt/cuda/nvidia/nccl/include/nccl.h $CUDA_HOME/include/
RUN cd /src && make -j"$(nproc)" cuda CUDA_ARCHS="$CUDA_ARCHS" CUDA_PTX="$CUDA_PTX" && \
    install -D -m 755 build/libquire_cuda.so /gpu/usr/lib/quire/libquire_cuda.so && strip /gpu/usr/lib/quire/libquire_cuda.so && \
    cp $CUDA_HOME/lib/libcublasLt.so.13 /opt/cuda/nvidia/nccl/lib/libnccl.so.2 /gpu/usr/lib/quire/ && \
    for package in cublas nccl; do install -d /gpu/usr/share/doc/nvidia-$package && \
        find /opt/cuda/nvidia_$package*.dist-info -iname "licen*" -type f -exec cp {} /gpu/usr/share/doc/nvidia-$package/ \;; done

FROM cpu AS gpu
COPY --from=build-gpu /gpu /
ENV LD_LIBRARY_PATH=/usr/lib/quire NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Without --target: the image for CPUs.
FROM cpu
