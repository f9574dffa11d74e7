-- How long web orders wait for shipping: grouped by a computed text.
select
  substr(w_warehouse_name, 1, 20) as warehouse, sm_type, web_name,
  sum(case when ws_ship_date_sk - ws_sold_date_sk <= 30 then 1 else 0 end) as days_30,
  sum(case when ws_ship_date_sk - ws_sold_date_sk > 30
    and ws_ship_date_sk - ws_sold_date_sk <= 60 then 1 else 0 end) as days_60,
  sum(case when ws_ship_date_sk - ws_sold_date_sk > 60
    and ws_ship_date_sk - ws_sold_date_sk <= 90 then 1 else 0 end) as days_90,
  sum(case when ws_ship_date_sk - ws_sold_date_sk > 90
    and ws_ship_date_sk - ws_sold_date_sk <= 120 then 1 else 0 end) as days_120,
  sum(case when ws_ship_date_sk - ws_sold_date_sk > 120 then 1 else 0 end) as days_more
from web_sales
join warehouse on w_warehouse_sk = ws_warehouse_sk
join ship_mode on sm_ship_mode_sk = ws_ship_mode_sk
join web_site on web_site_sk = ws_web_site_sk
join date_dim on d_date_sk = ws_ship_date_sk
where d_month_seq between 1200 and 1200 + 11
group by substr(w_warehouse_name, 1, 20), sm_type, web_name
order by warehouse, sm_type, web_name, days_30, days_60, days_90, days_120, days_more
limit 100
