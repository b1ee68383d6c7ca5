"""Pages of runs."""

from django.urls import include, path

from runs import run_views, views

urlpatterns = [
    path("", views.root, name="root"),
    path("", include("runs.accounts.urls")),
    path("theme", views.set_theme, name="theme"),
    path("runs", run_views.runs, name="runs"),
    path("fragments/runs", run_views.runs_table, name="runs_table"),
    path("runs/<slug:slug>", run_views.run, name="run"),
    path("runs/<slug:slug>/head", run_views.run_head, name="run_head"),
    path("runs/<slug:slug>/figure.json", run_views.run_figure, name="run_figure"),
]
