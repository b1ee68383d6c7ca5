# The server: web, worker, scheduler and migrations are one image with different commands.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /srv/andon
COPY requirements.txt .
RUN python -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir --require-hashes -r requirements.txt

FROM python:3.11.13-slim-bookworm
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    DJANGO_SETTINGS_MODULE=config.settings ANDON_DATA_DIR=/var/lib/andon ANDON_STATIC_DIR=/srv/andon/staticfiles
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/andon andon
WORKDIR /srv/andon
COPY --from=build /opt/venv /opt/venv
COPY manage.py ./
COPY config config
COPY andon andon
COPY runs runs
COPY evidence evidence
COPY incidents incidents
COPY templates templates
COPY static static
# Only collects files; the key is thrown away with the command that used it.
RUN ANDON_SECRET_KEY=$(python -c 'import secrets; print(secrets.token_urlsafe(48))') \
    python manage.py collectstatic --no-input --verbosity 0
USER andon
EXPOSE 8000
CMD ["granian", "--interface", "wsgi", "--host", "0.0.0.0", "--port", "8000", "--workers", "2", \
     "--blocking-threads", "8", "--backlog", "4096", "--backpressure", "4096", "--respawn-failed-workers", \
     "--no-ws", "--log-level", "warning", "config.wsgi:application"]
