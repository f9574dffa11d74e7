{# A materialized view of Penstock. It is kept fresh by the service, so a further run leaves it as it
   is; `--full-refresh` makes it anew, and with it those that depend on it. #}
{% materialization materialized_view, adapter='spark' %}
  {%- set target_relation = this.incorporate(type='view') -%}
  {{ run_hooks(pre_hooks) }}
  {% if should_full_refresh() %}
    {% call statement('drop') %}
      drop materialized view if exists {{ target_relation }} cascade
    {% endcall %}
  {% endif %}
  {% call statement('main') %}
    create materialized view if not exists {{ target_relation }} as
    {{ compiled_code }}
  {% endcall %}
  {{ run_hooks(post_hooks) }}
  {{ return({'relations': [target_relation]}) }}
{% endmaterialization %}
