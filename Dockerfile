# An image that trains: docker build -t shoal . && docker run --rm -v "$PWD:/work" shoal train
FROM python:3.12-slim

# A compiler: torch.compile makes kernels of C++ on the host.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir /src && useradd --uid 1000 --create-home shoal

USER shoal
WORKDIR /work
ENTRYPOINT ["shoal"]
