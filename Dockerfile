# The CPU suite in a container: docker build -t jetrl-bench . && docker run --rm -v "$PWD/results:/suite/results" jetrl-bench
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make git && rm -rf /var/lib/apt/lists/*
WORKDIR /suite
COPY . .
RUN PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install
CMD ["make", "run"]
