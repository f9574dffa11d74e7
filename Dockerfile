# Penstock's image: `docker build -t penstock .`; docs/guides/deployment.md says how to run it.
#
# Packages are those of requirements/, pinned with hashes, installed as `make setup` does. Java is
# Debian's. The service runs as a user without rights, and writes below /var/lib/penstock and /tmp.

FROM python:3.11-slim-bookworm AS build
WORKDIR /build
RUN python -m venv /opt/penstock
COPY requirements/build.txt requirements/base.txt requirements/connect.txt requirements/demo.txt requirements/
RUN /opt/penstock/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation --require-hashes --use-pep517 --requirement requirements/build.txt
RUN /opt/penstock/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation --require-hashes --use-pep517 --requirement requirements/base.txt
# Clients of Spark Connect, and documents in PostgreSQL.
RUN /opt/penstock/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation --require-hashes --use-pep517 --requirement requirements/connect.txt --requirement requirements/demo.txt
COPY pyproject.toml README.md LICENSE ./
COPY src/ src/
COPY examples/ examples/
RUN /opt/penstock/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11-slim-bookworm
RUN apt-get update \
 && apt-get install --yes --no-install-recommends openjdk-17-jre-headless tini \
 && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 penstock \
 && useradd --uid 10001 --gid 10001 --home-dir /var/lib/penstock --no-create-home --shell /usr/sbin/nologin penstock \
 && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PENSTOCK_STATE_DIR=/var/lib/penstock \
    PENSTOCK_METRICS_LISTEN=127.0.0.1:9464
# By number, so that an orchestrator sees that it is not root.
USER 10001:10001
WORKDIR /var/lib/penstock
VOLUME /var/lib/penstock
EXPOSE 6874 5432 15002 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
# Spark's child processes leave orphans, which process 1 has to reap.
ENTRYPOINT ["tini", "--", "penstock"]
CMD ["serve"]
