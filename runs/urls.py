"""Pages of runs."""

from django.urls import path

from runs import views

urlpatterns = [
    path("", views.root, name="root"),
    path("sign-in", views.sign_in, name="sign_in"),
    path("sign-out", views.sign_out, name="sign_out"),
    path("theme", views.set_theme, name="theme"),
    path("runs", views.runs, name="runs"),
    path("fragments/runs", views.runs_table, name="runs_table"),
    path("runs/<slug:slug>", views.run, name="run"),
    path("runs/<slug:slug>/head", views.run_head, name="run_head"),
    path("runs/<slug:slug>/figure.json", views.run_figure, name="run_figure"),
]
