# Quire for CPUs in a small image.   docker build -t quire . && docker run -p 8000:8000 quire
# A model of your own:   docker run -p 8000:8000 -v /srv/models:/models:ro quire serve /models/NAME
# One from the hub, kept: docker run -p 8000:8000 -v quire-cache:/var/cache/quire quire serve org/name
# The same commit gives the same image, byte for byte, where the builder sets the files' times (and the base and apt are the same):
#   SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) docker buildx build --output type=docker,rewrite-timestamp=true -t quire .
#   buildah bud --build-arg SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) --timestamp $(git log -1 --format=%ct) -t quire .
# What is in it: /usr/share/doc/quire/sbom.spdx.json.
# Works with --read-only, --cap-drop ALL and any --user: nothing is written.
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

FROM ${BASE}
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
