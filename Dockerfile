# docker build -t workbench . && docker run --rm -it -p 8888:8888 workbench
# Links are paced in our own transport inside; with --privileged, by the kernel, as outside a container.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /workbench
COPY . .
ARG PIP_ARGS=""
RUN make setup PIP_ARGS="$PIP_ARGS"
EXPOSE 8888
CMD [".venv/bin/jupyter", "lab", "--ip=0.0.0.0", "--allow-root", "--no-browser", "notebooks"]
