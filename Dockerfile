# Quire for CPUs in a small image.   docker build -t quire . && docker run -p 8000:8000 quire
# A model of your own:   docker run -p 8000:8000 -v /srv/models:/models:ro quire serve /models/NAME
# One from the hub, kept: docker run -p 8000:8000 -v quire-cache:/var/cache/quire quire serve org/name
# Works with --read-only, --cap-drop ALL and any --user: nothing is written.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
COPY scripts/install-deps /src/scripts/install-deps
RUN /src/scripts/install-deps
COPY . /src
# Beside the installation, the names of the packages that hold the libraries it needs: they differ between releases.
RUN cd /src && make -j"$(nproc)" && make install DESTDIR=/out PREFIX=/usr && strip /out/usr/bin/quire && \
    ldd /out/usr/bin/quire | awk '$2 == "=>" {print $3}' | xargs -n 1 readlink -f | \
    while read -r file; do dpkg -S "*/${file##*/}" | cut -d : -f 1 | head -1; done | sort -u >/out/packages

FROM ${BASE}
COPY --from=build /out/packages /tmp/packages
RUN apt-get update && xargs -a /tmp/packages apt-get install -y --no-install-recommends ca-certificates && \
    install -d -o 10001 -g 10001 /var/cache/quire && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/debconf/* /var/log/* /tmp/packages
COPY --from=build /out/usr /usr
COPY --from=build /out/etc/quire /etc/quire
ENV QUIRE_HOST=0.0.0.0 HF_HOME=/var/cache/quire
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["quire", "health"]
ENTRYPOINT ["quire"]
CMD ["serve"]
